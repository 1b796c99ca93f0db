"""`python -m jzero`: see `python -m jzero estimate --help`."""

from jzero.cli._main import main

if __name__ == "__main__":
    main()
