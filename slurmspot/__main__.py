"""``python -m slurmspot`` is the same program as ``slurmspot``."""

from slurmspot.cli import main

if __name__ == "__main__":
    main()
