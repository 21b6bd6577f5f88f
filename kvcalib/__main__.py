"""`python -m kvcalib`: the same command as the console script `kvcalib`."""

from kvcalib.cli import main

if __name__ == "__main__":
    main()
