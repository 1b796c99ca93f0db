# SPDX-License-Identifier: Apache-2.0
"""Jaxprs as jzero reads and writes them: rules of primitives, layouts, regions, dataflow, writers."""
