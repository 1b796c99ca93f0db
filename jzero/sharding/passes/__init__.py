# SPDX-License-Identifier: Apache-2.0
"""Passes: functions from one device's program to another that computes the same.

A program is a jaxpr with explicit collectives, whose calls are inlined. Several passes ask further things:

* `rows`: for each argument, the data axes over which it differs because it holds rows of the batch;
* `specs`: how XLA shards arguments and results over the mesh's Auto axes.
"""
