"""Ways to spread a training over a cluster: what a rank holds, how long a step takes, which are the best."""
