"""ScoreQueue of answers in chunks, as an accelerator has them made; here on a CPU."""

import pytest
import torch
from torch import Tensor, nn

import ttvd
from ttvd.bench import Row, run_stream
from ttvd.bench.run import CHUNK, BatchOutput, BatchScore, BatchTimer, OutputChunk, ScoreQueue
from ttvd.engine.cuda_graphs import refusing_to_wait


class Elsewhere(Tensor):
    """Says that it is on an accelerator."""

    is_cuda = True


def make_answer(seed: int, size: int = 6) -> BatchOutput:
    generator = torch.Generator().manual_seed(seed)
    clock = BatchTimer(torch.device("cpu"))
    clock.stop()
    logits = torch.randn(size, 3, generator=generator)
    return BatchOutput(
        logits, torch.randint(3, (size,), generator=generator), torch.tensor(seed / 100), clock
    )


def far(answer: BatchOutput) -> BatchOutput:
    return answer._replace(logits=answer.logits.as_subclass(Elsewhere))


def assert_same(found: list[BatchScore], expected: list[BatchOutput]) -> None:
    assert len(found) == len(expected)
    for score, answer in zip(found, expected, strict=True):
        alone = answer.score()
        assert score.kept == pytest.approx(alone.kept)
        assert score.seconds == alone.seconds
        for name, value in alone.metrics.items():
            assert score.metrics[name] == pytest.approx(value, abs=1e-12)


def test_a_chunk_gives_the_scores_of_its_answers() -> None:
    answers = [make_answer(seed, size) for seed, size in enumerate([6, 6, 2, 6, 5])]
    assert_same(OutputChunk(answers).scores(), answers)


def test_a_chunk_says_what_is_wrong_as_a_batch_by_itself_does() -> None:
    answers = [make_answer(seed) for seed in range(4)]
    answers[2].logits[0, 0] = float("nan")
    chunk = OutputChunk(answers)
    with pytest.raises(ValueError, match="the predictor has diverged"):
        chunk.scores()


@pytest.fixture
def far_chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the chunks that are made, of tensors that only say that they are elsewhere."""
    made: list[int] = []

    class Near(OutputChunk):
        def __init__(self, answers: list[BatchOutput]) -> None:
            made.append(len(answers))
            super().__init__([a._replace(logits=a.logits.as_subclass(Tensor)) for a in answers])

    monkeypatch.setattr("ttvd.bench.run.OutputChunk", Near)
    return made


@pytest.mark.parametrize("count", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_every_answer_is_scored_once_and_in_order(far_chunks: list[int], count: int) -> None:
    answers = [make_answer(seed) for seed in range(count)]
    scores, found, ahead = ScoreQueue(), list[BatchScore](), 0
    for number, answer in enumerate(answers):
        found += scores.add(far(answer))
        ahead = max(ahead, number + 1 - len(found))
    found += scores.finish()
    assert scores.finish() == []
    assert_same(found, answers)
    assert ahead <= 2 * CHUNK
    assert sum(far_chunks) == count
    assert all(size == CHUNK for size in far_chunks[:-1])


def test_on_a_cpu_scores_come_at_once() -> None:
    scores = ScoreQueue()
    assert all(len(scores.add(make_answer(seed))) == 1 for seed in range(3))
    assert scores.finish() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_device_has_the_scores_of_one_on_a_cpu() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    stream = [(torch.rand(6 - n % 2, 1, 2, 2), torch.randint(3, (6 - n % 2,))) for n in range(2 * CHUNK + 7)]
    seen: list[Row] = []
    near = run_stream(ttvd.create("bn", net.double()), [(x.double(), y) for x, y in stream])
    net = net.cuda()
    far_away = [(x.double().cuda(), y.cuda() if n % 3 else y) for n, (x, y) in enumerate(stream)]
    record = run_stream(ttvd.create("bn", net), far_away, progress=seen.append)
    assert tuple(seen) == record.rows
    for one, other in zip(near.rows, record.rows, strict=True):
        assert one.metrics["correct"] == other.metrics["correct"]
        assert one.metrics["nll_sum"] == pytest.approx(other.metrics["nll_sum"], rel=1e-9)
        assert other.seconds > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_batch_waits_for_the_device() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).cuda()
    adapter = ttvd.create("tent", net)
    stream = [
        (torch.rand(6, 1, 2, 2, device="cuda"), torch.zeros(6, device="cuda").long())
        for _ in range(3 * CHUNK)
    ]
    run_stream(adapter, stream)
    with refusing_to_wait():
        assert len(run_stream(adapter, stream).rows) == 3 * CHUNK
