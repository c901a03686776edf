"""A round: who takes part, what clients keep, how their answers are averaged."""
