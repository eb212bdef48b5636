"""The memory that a step's arrays share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv.engine.step_arrays import StepArrays

CPU = torch.device("cpu")


def test_what_is_written_is_what_the_tensor_has_and_nothing_overlaps() -> None:
    arrays = StepArrays(300, CPU)
    for _ in range(3):
        arrays.begin(300)
        taken = [
            arrays.take(np.int64, 3),
            arrays.take(np.int32, 5),
            arrays.take(np.float32, 1),
            arrays.take(np.int32, 0),
            arrays.take(np.float64, 2),
            arrays.take(np.int32, 3, 2),
        ]
        for number, (array, _) in enumerate(taken):
            array[...] = number
        arrays.send()
        for number, (array, tensor) in enumerate(taken):
            assert tensor.shape == array.shape
            assert tensor.data_ptr() % 16 == 0 or not tensor.numel()
            assert (tensor == number).all()


@pytest.mark.parametrize("num_bytes", [100, 101, 4000])
def test_a_step_that_is_larger_than_usual_has_memory_of_its_own(num_bytes: int) -> None:
    arrays = StepArrays(100, CPU)
    arrays.begin(num_bytes)
    large = arrays.take(np.int64, num_bytes // 8)[0]
    large[:] = 7
    arrays.begin(100)
    usual = arrays.take(np.int64, 12)[0]
    usual[:] = 1
    assert (large == 7).all() == (num_bytes > 100)
