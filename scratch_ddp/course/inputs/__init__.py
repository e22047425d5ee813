"""The inputs and worlds in which checks try an answer: tensors and models of every kind, other numbers of ranks."""
