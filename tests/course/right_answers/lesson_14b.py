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
    "send_rows": [
        # counts elements, not rows
        """
        n, columns = dist.get_world_size(group), rows.shape[1]
        leaving = torch.tensor(counts, device=rows.device) * columns
        arriving = torch.zeros(n, dtype=leaving.dtype, device=rows.device)
        dist.all_to_all_single(arriving, leaving, [1] * n, [1] * n, group=group)
        flat = torch.zeros(int(arriving.sum()), dtype=rows.dtype, device=rows.device)
        dist.all_to_all_single(flat, rows.reshape(-1), arriving.tolist(), leaving.tolist(), group=group)
        return flat.reshape(-1, columns)
        """,
    ],
}
