"""A verified checkpoint store. Knows no Slurm."""
