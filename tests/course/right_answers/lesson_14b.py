"""Other right answers to the exercises of lesson 14b."""

RIGHT_ANSWERS = {
    "shift": [
        # both messages in one batch
        {
            "        sending = dist.isend(mine, group=group, group_dst=(rank + step) % n)\n": (
                "        send = dist.P2POp(dist.isend, mine, group=group, group_peer=(rank + step) % n)\n"
            ),
            "dist.recv(arriving, group=group, group_src=(rank - step) % n)": (
                "receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - step) % n)"
            ),
            "sending.wait()": "[work.wait() for work in dist.batch_isend_irecv([receive, send])]",
        },
    ],
}
