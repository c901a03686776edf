"""``fedrolex paper``: the tables and figures of the paper, trained cell by cell and collected."""
