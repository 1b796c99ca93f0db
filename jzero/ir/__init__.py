# SPDX-License-Identifier: Apache-2.0
"""What everything that reads a jaxpr is written on."""
