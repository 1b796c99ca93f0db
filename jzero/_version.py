# SPDX-License-Identifier: Apache-2.0
"""The version that is installed: that of the tag it was built from, and of the commits since."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("jzero")
except PackageNotFoundError:  # A checkout on the path that was never built.
    __version__ = "0+unknown"
