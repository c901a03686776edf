"""A cohort on many processes and machines, through Ray."""
