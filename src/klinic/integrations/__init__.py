"""klinic beside somebody else's trainer: today, TRL's own KL expression to compare ours with."""
