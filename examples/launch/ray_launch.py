"""Ray: an actor for each machine, which drives all of its GPUs.

python examples/launch/ray_launch.py --nodes 2 --gpus 8 -- --steps 1000 --checkpoints /shared/run
"""

import argparse
import os
import socket

import ray


class Worker:
    """A process on a machine. JAX is first imported by `train`, when the process knows who it is."""

    def address(self) -> str:
        with socket.socket() as listener:
            listener.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{listener.getsockname()[1]}"

    def train(self, address: str, num_processes: int, index: int, argv: list[str]) -> float:
        os.environ["JAX_COORDINATOR_ADDRESS"] = address
        os.environ["JAX_NUM_PROCESSES"] = str(num_processes)
        os.environ["JAX_PROCESS_ID"] = str(index)
        import train

        return train.main(argv)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=8, help="of a node")
    parser.add_argument("argv", nargs="*", help="for train.py, after --")
    args = parser.parse_args()
    # Workers import train.py from this folder, which Ray copies to them.
    ray.init(runtime_env={"working_dir": os.path.dirname(os.path.abspath(__file__))})
    # With all GPUs of a node, each worker has a node to itself.
    worker_class = ray.remote(num_gpus=args.gpus)(Worker)
    workers = [worker_class.remote() for _ in range(args.nodes)]
    address = ray.get(workers[0].address.remote())
    losses = ray.get(
        [worker.train.remote(address, args.nodes, i, args.argv) for i, worker in enumerate(workers)]
    )
    print(f"loss {losses[0]:.6f}")


if __name__ == "__main__":
    main()
