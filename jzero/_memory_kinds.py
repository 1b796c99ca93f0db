"""Where leaves rest: `memory_kind`s of JAX, and the host's ordinary memory, which is none of them."""

DEVICE, PINNED, HOST = "device", "pinned_host", "host"
