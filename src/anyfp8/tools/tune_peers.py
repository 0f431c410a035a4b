"""Other libraries' products beside ours in the final race; their µs are rows, never winners.

torch's 16-bit product always, so that a table says where FP8 gains nothing; other libraries where
their folder is named. None of them can fail a cell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyfp8.problem import Scheme
from anyfp8.tools.bench_gemm import judged
from anyfp8.tools.gemm_contenders import Layer, Setting, first_line
from anyfp8.tools.gemm_operands import Operands
from anyfp8.tools.gemm_peers import baselines, find_peers
from anyfp8.tools.gemm_shapes import Shape
from anyfp8.tools.timing import Call

if TYPE_CHECKING:
    from anyfp8.tools.tune_cells import Cell


class Peers:
    """The peers of one shape, made when a race first asks."""

    def __init__(self, cell: Cell, m_most: int, seed: int, copies: int, folder: str | None) -> None:
        """Args: folder: where other libraries lie, see `gemm_peers`."""
        self._scheme, self._n, self._k = cell.scheme, cell.n, cell.k
        self._of = (m_most, seed, copies, folder)
        self._operands: Operands | None = None
        self._layers: dict[str, Layer] = {}

    def contenders(self, op: str, m: int) -> tuple[dict[str, list[Call]], dict[str, str]]:
        """({name: calls}, {name: why it has none}) for m rows."""
        try:
            found, failed = self._layer(op).contenders(m)
        except Exception as error:
            return {}, {"peers": first_line(error)}
        assert self._operands is not None
        right = {}
        for contender in found:
            try:
                _, complaint = judged(contender, self._operands, m)
            except Exception as error:
                complaint = first_line(error)
            if complaint:
                failed[contender.name] = complaint
            else:
                right[contender.name] = contender.calls
        return right, failed

    def _layer(self, op: str) -> Layer:
        if op not in self._layers:
            m_most, seed, copies, folder = self._of
            if self._operands is None:
                self._operands = Operands(self._n, self._k, m_most, "cuda", seed, copies)
            dense = [peer for peer in baselines() if peer.name == "torch bf16"]
            libraries = find_peers(folder)[0] if folder else []
            shape = Shape("", self._n, self._k)
            setting = Setting(op, _raceable(self._scheme), (m_most,), ())
            self._layers[op] = Layer(setting, shape, self._operands, [*dense, *libraries])
        return self._layers[op]


def _raceable(scheme: Scheme) -> Scheme:
    """As the benchmarks know it: they ask peers for the same scales, static or not."""
    if (scheme.activation, scheme.dynamic) == ("tensor", True):
        return Scheme(scheme.weight, "tensor", False)
    return scheme
