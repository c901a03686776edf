"""Methods, one file each; each reads like its paper's algorithm."""
