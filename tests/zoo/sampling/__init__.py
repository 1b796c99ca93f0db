"""Small random train steps, each drawn from one integer seed, checked against one device.

A program is Python source, put together from tables of templates: `rowwise` and `couplings` make new
features `[B, n]` of old ones, `losses` a number and outputs of them, `gradients` gradients, `state` what
else a step remembers. So the listing of a program is the program. `settings` draws how it is sharded,
`check` compares.
"""
