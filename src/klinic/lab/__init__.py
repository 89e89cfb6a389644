"""Measurements of klinic itself: fault injection, the scoreboard of the doctor, ablations, demo."""
