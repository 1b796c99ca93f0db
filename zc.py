import jax, jax.numpy as jnp, numpy as np
from jzero.offload._memory import host_empty
cpu=jax.devices("cpu")[0]
for dt in (np.float32,jnp.bfloat16,np.int32,np.float16):
    x=host_empty((1<<20,),dt); x[:]=0
    y=jax.device_put(x,cpu,may_alias=True); z=jax.device_put([x],may_alias=True)[0]; w=jax.device_put(x[:1<<19],may_alias=True); v=jax.device_put(x[32:],cpu,may_alias=True)
    print(dt, y.unsafe_buffer_pointer()==x.ctypes.data, z.unsafe_buffer_pointer()==x.ctypes.data, w.unsafe_buffer_pointer()==x.ctypes.data, v.unsafe_buffer_pointer()==x[32:].ctypes.data)
