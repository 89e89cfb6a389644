"""What a run is asked to do: the sections of a recipe, its aliases and its loading."""
