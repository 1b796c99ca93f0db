# SPDX-License-Identifier: Apache-2.0
"""`python -m jzero`: the command `jzero` where it is not on the path."""

from jzero.cli._main import main

if __name__ == "__main__":
    main(prog="python -m jzero")
