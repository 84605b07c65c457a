"""A private, real Slurm cluster on this machine."""
