"""Whole programs of reinforcement learning, with Flax Linen."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

from ._script import NUM_STEPS, script

TrainState: Any = train_state.TrainState


class ActorCritic(nn.Module):
    num_actions: int = 3

    @nn.compact
    def __call__(self, x):
        actor = nn.tanh(nn.Dense(16, kernel_init=nn.initializers.orthogonal(np.sqrt(2)))(x))
        critic = nn.tanh(nn.Dense(16, kernel_init=nn.initializers.orthogonal(np.sqrt(2)))(x))
        logits = nn.Dense(self.num_actions, kernel_init=nn.initializers.orthogonal(0.01))(actor)
        return logits, nn.Dense(1)(critic).squeeze(-1)


class Transition(NamedTuple):
    done: jax.Array
    action: jax.Array
    value: jax.Array
    reward: jax.Array
    log_prob: jax.Array
    obs: jax.Array


@script()
def purejaxrl_ppo(jit):
    """A `runner_state` alone: environments, rollouts, permuted minibatches and epochs, all in the step."""
    num_envs, num_steps, gamma, lam, clip = 16, 4, 0.99, 0.95, 0.2

    def env_step(env_state, action):
        position, time = env_state
        position = jnp.clip(position + 0.1 * (action - 1), -1, 1)
        done = time >= 3
        reward = 1.0 - jnp.abs(position)
        env_state = jnp.where(done, 0.5, position), jnp.where(done, 0, time + 1)
        return observe(env_state), env_state, reward, done

    def observe(env_state):
        position, time = env_state
        return jnp.stack([position, position**2, time / 3, jnp.ones_like(position)], axis=-1)

    network: Any = ActorCritic()

    def log_probs(logits, action):
        return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1)[..., 0]

    @jit
    def update_step(runner_state):
        def env_steps(runner_state, _):
            train_state, env_state, last_obs, rng = runner_state
            rng, key = jax.random.split(rng)
            logits, value = network.apply(train_state.params, last_obs)
            action = jax.random.categorical(key, logits)
            obs, env_state, reward, done = jax.vmap(env_step)(env_state, action)
            log_prob = log_probs(logits, action)
            transition = Transition(done, action, value, reward, log_prob, last_obs)
            return (train_state, env_state, obs, rng), transition

        runner_state, traj_batch = jax.lax.scan(env_steps, runner_state, None, num_steps)
        train_state, env_state, last_obs, rng = runner_state
        _, last_val = network.apply(train_state.params, last_obs)

        def advantage(carry, transition):
            gae, next_value = carry
            alive = 1 - transition.done
            delta = transition.reward + gamma * next_value * alive - transition.value
            gae = delta + gamma * lam * alive * gae
            return (gae, transition.value), gae

        start = (jnp.zeros_like(last_val), last_val)
        _, advantages = jax.lax.scan(advantage, start, traj_batch, reverse=True, unroll=4)

        def update_epoch(update_state, _):
            def update_minibatch(train_state, minibatch):
                def loss_fn(params, traj, gae, targets):
                    logits, value = network.apply(params, traj.obs)
                    ratio = jnp.exp(log_probs(logits, traj.action) - traj.log_prob)
                    gae = (gae - gae.mean()) / (gae.std() + 1e-8)
                    clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
                    actor_loss = -jnp.minimum(ratio * gae, clipped * gae).mean()
                    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1)
                    value_loss = 0.5 * jnp.square(value - targets).mean()
                    return actor_loss + 0.5 * value_loss - 0.01 * entropy.mean()

                loss, grads = jax.value_and_grad(loss_fn)(train_state.params, *minibatch)
                return train_state.apply_gradients(grads=grads), loss

            train_state, rng = update_state
            rng, key = jax.random.split(rng)
            permutation = jax.random.permutation(key, num_envs * num_steps)
            batch = (traj_batch, advantages, advantages + traj_batch.value)
            batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[permutation], batch)
            minibatches = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
            train_state, losses = jax.lax.scan(update_minibatch, train_state, minibatches)
            return (train_state, rng), losses

        update_state, losses = jax.lax.scan(update_epoch, (train_state, rng), None, 2)
        train_state, rng = update_state
        metrics = {"reward": traj_batch.reward.mean(), "losses": losses}
        return (train_state, env_state, last_obs, rng), metrics

    rng = jax.random.PRNGKey(30)
    rng, key = jax.random.split(rng)
    env_state = (jnp.linspace(-1, 1, num_envs), jnp.zeros(num_envs, jnp.int32))
    obs = observe(env_state)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3, eps=1e-3))
    params = network.init(key, obs)
    train_state = TrainState.create(apply_fn=network.apply, params=params, tx=tx)
    runner_state, log = (train_state, env_state, obs, rng), []
    for _ in range(NUM_STEPS):
        runner_state, metrics = update_step(runner_state)
        log.append(metrics)
    return runner_state, log
