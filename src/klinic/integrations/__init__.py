"""klinic beside somebody else's trainer: today, TRL's."""
