"""`python -m jzero`: see `python -m jzero estimate --help`."""

from jzero._cli import main

if __name__ == "__main__":
    main()
