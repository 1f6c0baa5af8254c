"""The batch size of one step of one rank, where gradients are accumulated."""

from shardwright.errors import UsageError, whole_number


def micro_batch(effective_batch: int, accumulation_steps: int = 1, world: int = 1) -> int:
    """The ``batch_size`` for `make_loader`, so that an optimiser step sees ``effective_batch`` samples.

    Parameters
    ----------
    effective_batch
        Samples of one optimiser step, over all ranks and accumulated steps.
    accumulation_steps
        Batches whose gradients are added up for one optimiser step.
    world
        Ranks.

    Raises
    ------
    UsageError
        They do not divide: names the nearest effective batches that would.

    Examples
    --------
    256 samples a step, on 2 ranks that have memory for 32 at once::

        steps = 4
        loader = make_loader(train, micro_batch(256, steps, world=2), shuffle=True, drop_last=True)
        for k, (images, labels) in enumerate(loader, 1):
            loss = criterion(model(images.float()), labels) / steps  # each is the mean of its batch
            loss.backward()
            if k % steps == 0:
                optimizer.step()
                optimizer.zero_grad()

    If the batches of an epoch are no multiple of ``steps``, what is left over waits for the next epoch: here
    ``zero_grad`` at its beginning leaves it out.
    """
    effective_batch = whole_number("effective_batch", effective_batch, 1)
    accumulation_steps = whole_number("accumulation_steps", accumulation_steps, 1)
    world = whole_number("world", world, 1)
    shares = accumulation_steps * world
    size, left = divmod(effective_batch, shares)
    if left:
        near = [shares * n for n in (size, size + 1) if n]
        raise UsageError(
            f"effective_batch is {effective_batch}, which {accumulation_steps} accumulation_steps on {world} ranks, "
            f"{shares} batches, do not divide: take {' or '.join(map(str, near))}"
        )
    return size
