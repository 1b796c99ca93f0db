"""Whole programs of reinforcement learning, with Flax Linen."""

from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

from ._script import BATCH_SIZE, NUM_STEPS, adam, script

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


@script()
def cleanrl_dqn(jit):
    """The state returned last, behind rows; a replay buffer in NumPy; a target network."""

    class QNetwork(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.silu(nn.Dense(32)(nn.silu(nn.Dense(32)(x)))))

    class QState(TrainState):  # type: ignore[misc]
        target_params: Any

    class ReplayBuffer:
        def __init__(self, size, rng):
            self.rng, self.size, self.num = rng, size, 0
            self.obs = np.zeros((size, 2, 4), np.float32)
            self.actions, self.rewards = np.zeros((size, 1), np.int32), np.zeros(size, np.float32)
            self.dones = np.zeros(size, bool)

        def add(self, obs, next_obs, action, reward, done):
            i = self.num % self.size
            self.obs[i], self.actions[i] = (obs, next_obs), action
            self.rewards[i], self.dones[i] = reward, done
            self.num += 1

        def sample(self, num):
            i = self.rng.integers(0, min(self.num, self.size), num)
            return self.obs[i, 0], self.actions[i], self.obs[i, 1], self.rewards[i], self.dones[i]

    q_network: Any = QNetwork()
    rng = np.random.default_rng(0)
    q_network_apply = jax.jit(q_network.apply)
    params = q_network.init(jax.random.PRNGKey(0), np.zeros((1, 4), np.float32))
    q_state = QState.create(
        apply_fn=q_network.apply, params=params, tx=adam(),
        target_params=q_network.init(jax.random.PRNGKey(1), np.zeros((1, 4), np.float32)),
    )  # fmt: skip

    @jit
    def update(q_state, observations, actions, next_observations, rewards, dones):
        q_next = q_network.apply(q_state.target_params, next_observations).max(axis=-1)
        targets = rewards + (1 - dones) * 0.99 * q_next

        def mse_loss(params):
            q_pred = q_network.apply(params, observations)
            q_pred = q_pred[jnp.arange(q_pred.shape[0]), actions.squeeze()]
            return ((q_pred - targets) ** 2).mean(), q_pred

        (loss_value, q_pred), grads = jax.value_and_grad(mse_loss, has_aux=True)(q_state.params)
        q_state = q_state.apply_gradients(grads=grads)
        return loss_value, q_pred, q_state

    buffer, log = ReplayBuffer(64, rng), []
    obs = rng.normal(size=4).astype(np.float32)
    for global_step in range(80):
        epsilon = max(0.1, 1 - global_step / 40)
        if rng.random() < epsilon:
            action = int(rng.integers(3))
        else:
            action = int(q_network_apply(q_state.params, obs[None]).argmax())
        next_obs = np.roll(obs, action) * np.float32(0.9)
        buffer.add(obs, next_obs, action, next_obs.sum(), global_step % 10 == 9)
        obs = rng.normal(size=4).astype(np.float32) if global_step % 10 == 9 else next_obs
        if global_step >= 40 and global_step % 10 == 0:
            loss, q_values, q_state = update(q_state, *buffer.sample(BATCH_SIZE))
            log.append({"loss": float(loss), "q_values": q_values.mean().item()})
        if global_step % 20 == 0:
            q_state = q_state.replace(
                target_params=optax.incremental_update(q_state.params, q_state.target_params, 0.5)
            )
    return q_state, log


@script()
def jaxrl_agent(jit):
    """`agent, info = agent.update(batch)`: a jitted method of a dataclass, which is itself the state."""

    class Critic(nn.Module):
        @nn.compact
        def __call__(self, observations, actions):
            x = jnp.concatenate([observations, actions], -1)
            return nn.Dense(1)(nn.gelu(nn.Dense(32)(x))).squeeze(-1)

    class Policy(nn.Module):
        @nn.compact
        def __call__(self, observations):
            x = nn.gelu(nn.Dense(32)(observations))
            return jnp.tanh(nn.Dense(2)(x)), nn.Dense(2)(x)

    def pair(*args):
        """Two critics, their parameters stacked."""
        return nn.vmap(
            Critic,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=2,
        )(*args)

    @flax.struct.dataclass
    class Agent:
        rng: jax.Array
        actor: TrainState
        critic: TrainState
        target: Any
        log_alpha: TrainState
        discount: float = flax.struct.field(pytree_node=False)

        def sample(self, params, rng, observations):
            mean, log_std = self.actor.apply_fn(params, observations)
            noise = jax.random.normal(rng, mean.shape)
            log_prob = jax.scipy.stats.norm.logpdf(noise) - log_std
            return mean + jnp.exp(log_std) * noise, log_prob.sum(-1)

        @jit
        def update(self, batch):
            rng, next_rng, actor_rng = jax.random.split(self.rng, 3)
            alpha = jnp.exp(self.log_alpha.params["value"])
            actions, log_prob = self.sample(self.actor.params, next_rng, batch["next_observations"])
            next_q = self.critic.apply_fn(self.target, batch["next_observations"], actions).min(0)
            target_q = batch["rewards"] + self.discount * batch["masks"] * (
                next_q - alpha * log_prob
            )

            def critic_loss(params):
                q = self.critic.apply_fn(params, batch["observations"], batch["actions"])
                return ((q - target_q) ** 2).sum(0).mean()

            value, grads = jax.value_and_grad(critic_loss)(self.critic.params)
            critic = self.critic.apply_gradients(grads=grads)

            def actor_loss(params):
                actions, log_prob = self.sample(params, actor_rng, batch["observations"])
                q = critic.apply_fn(critic.params, batch["observations"], actions).min(0)
                return (alpha * log_prob - q).mean(), -log_prob.mean()

            grads, entropy = jax.grad(actor_loss, has_aux=True)(self.actor.params)
            actor = self.actor.apply_gradients(grads=grads)
            grads = jax.grad(lambda p: jnp.exp(p["value"]) * (entropy + 2.0))(self.log_alpha.params)
            log_alpha = self.log_alpha.apply_gradients(grads=grads)
            target = optax.incremental_update(critic.params, self.target, 0.1)
            agent = self.replace(  # type: ignore[attr-defined]
                rng=rng, actor=actor, critic=critic, target=target, log_alpha=log_alpha
            )
            return agent, {"critic_loss": value, "entropy": entropy, "alpha": alpha}

    def batches():
        rng = np.random.default_rng(0)
        normal = lambda *shape: rng.normal(size=(BATCH_SIZE, *shape)).astype(np.float32)  # noqa: E731
        for _ in range(NUM_STEPS):
            yield {
                "observations": normal(6),
                "actions": np.tanh(normal(2)),
                "rewards": normal(),
                "masks": np.float32(rng.random(BATCH_SIZE) < 0.9),
                "next_observations": normal(6),
            }

    rng, actor_rng, critic_rng = jax.random.split(jax.random.PRNGKey(42), 3)
    observations, actions = np.zeros((1, 6), np.float32), np.zeros((1, 2), np.float32)
    policy, critics = Policy(), pair()
    critic_params = critics.init(critic_rng, observations, actions)
    create = TrainState.create
    agent: Any = Agent(
        rng,
        create(apply_fn=policy.apply, params=policy.init(actor_rng, observations), tx=adam()),
        create(apply_fn=critics.apply, params=critic_params, tx=adam()),
        jax.tree.map(jnp.copy, critic_params),
        create(apply_fn=None, params={"value": jnp.zeros(())}, tx=adam()),
        discount=0.99,
    )
    infos = []
    for batch in batches():
        agent, info = agent.update(batch)
        infos.append({f"training/{k}": v for k, v in info.items()})
    return agent, infos
