"""Other right answers to the exercises of lesson 18."""

RIGHT_ANSWERS = {
    "outer_step": (
        """
        means = [mine.clone() for mine in params]
        works = [dist.all_reduce(mean, async_op=True) for mean in means]
        for mine, last, speed, mean, work in zip(params, agreed, velocity, means, works):
            work.wait()
            gradient = last - mean / dist.get_world_size()
            speed.copy_(momentum * speed + gradient)
            last -= lr * gradient + lr * momentum * speed
            mine[:] = last
        """,
    ),
}
