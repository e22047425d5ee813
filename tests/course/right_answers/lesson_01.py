"""Other right answers to the exercises of lesson 01."""

RIGHT_ANSWERS = {
    "all_gather_uneven": [
        # rows of one matrix
        """
        lengths = torch.empty(world_size, dtype=torch.int64)
        dist.all_gather(list(lengths.split(1)), torch.tensor([len(tensor)]))
        longest = lengths.max().item()
        padded = torch.nn.functional.pad(tensor, (0, longest - len(tensor)), value=7)
        rows = tensor.new_empty(world_size, longest)
        dist.all_gather(list(rows), padded)
        pieces = [row[:length] for row, length in zip(rows, lengths.tolist())]
        """,
    ],
}
