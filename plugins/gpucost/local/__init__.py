"""How is a job tried out on this machine? The same packing, agent and checkpoints as on a node, without Airflow."""
