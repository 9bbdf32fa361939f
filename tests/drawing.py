"""Random tensors that depend on their seed alone."""

import torch


def _seeded(draw):
    def of_seed(*args, seed, **options):
        generator = torch.Generator().manual_seed(seed)
        return draw(*args, generator=generator, **options)

    return of_seed


randn, rand, randint = map(_seeded, (torch.randn, torch.rand, torch.randint))
