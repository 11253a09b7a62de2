import asyncio
import threading

import pytest
import torch

from meshllm.node.worker import calibrate, compute_thread


async def test_functions_run_off_the_loop_in_the_order_given() -> None:
    seen: list[tuple[int, str]] = []

    def note(number: int) -> None:
        seen.append((number, threading.current_thread().name))

    async with compute_thread(1) as worker:
        await asyncio.gather(*(worker.run(note, number) for number in range(9)))

    assert [number for number, _ in seen] == list(range(9))
    assert {name for _, name in seen} == {"compute_0"}


async def test_torch_gets_the_threads_it_was_promised_and_no_gradients() -> None:
    async with compute_thread(1) as worker:
        assert await worker.run(torch.get_num_threads) == 1
        assert not await worker.run(torch.is_grad_enabled)


async def test_an_error_reaches_who_asked() -> None:
    async with compute_thread() as worker:
        with pytest.raises(ZeroDivisionError):
            await worker.run(lambda: 1 // 0)

        assert await worker.run(lambda: 2) == 2


async def test_the_number_of_threads_is_measured_and_then_used() -> None:
    before = torch.get_num_threads()
    async with compute_thread(2) as worker:
        chosen = await worker.run(calibrate, 2, 64, torch.float32)

        assert chosen in {1, 2}
        assert await worker.run(torch.get_num_threads) == chosen
    assert torch.get_num_threads() == before
