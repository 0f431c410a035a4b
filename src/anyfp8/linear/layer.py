"""y = x · dequantize(W)ᵀ + bias: a linear layer whose weight is FP8.

Create it on meta, load a weight, prepare once, apply. `prepare` asks `select.plan` which backend
serves each M on this device and stores the weight as that backend wants it; `state_dict` always
gives the canonical form back: codes [N, K], fp32 scales, logical shapes.

The surprise: `.half()`, `.to(dtype)` and their kin change the bias and the dtype of coming
activations only. A plain module would cast the FP8 codes to 16 bits without their scale, which is
garbage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyfp8.errors import InputError
from anyfp8.gemm.base import PreparedWeight
from anyfp8.launcher import refuse_capture
from anyfp8.linear.calls import Call, find, in_full
from anyfp8.linear.op import traced_linear
from anyfp8.linear.plans import PREPARED, facts_of, plan_of
from anyfp8.problem import DTYPE_NAMES, QTensor, Scheme
from anyfp8.replay import pointers_of
from anyfp8.select import Plan, Request

_CANONICAL = ("weight", "weight_scale")


class Fp8Linear(torch.nn.Module):
    """A linear layer [N, K] with FP8 weights.

    Args:
        in_features, out_features: K and N.
        scheme: how weights and activations are quantized.
        bias: whether there is one.
        dtype: of the bias and of the activations to come (bf16, fp16 or fp32).
        device: of the parameters; "meta" allocates nothing until a weight is loaded.
        request: what to ask of the selection; the environment fills in the rest.

    Attributes:
        weight: [N, K] float8_e4m3fn, also while a backend stores it differently.
        weight_scale: fp32; [] , [N, 1] or [ceil(N/bn), ceil(K/bk)].
        input_scale: fp32 [] for static schemes, else None.
        bias: [N] or None.

    Raises:
        InputError: a dtype that activations cannot have.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: Scheme,
        *,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        request: Request | None = None,
    ) -> None:
        super().__init__()
        if dtype not in DTYPE_NAMES:
            raise InputError(
                "not a dtype of activations", got=str(dtype), want=", ".join(DTYPE_NAMES.values())
            )
        self.in_features, self.out_features = in_features, out_features
        self.scheme = scheme
        self.dtype = dtype
        self.request = request or Request()
        self._prepared: PreparedWeight | None = None
        self._stored: list[torch.Tensor] = []
        self._keys: dict[torch.dtype, str] = {}
        # elements of x -> how such a call is made again, with the weight's addresses
        self._known: dict[int, tuple[Call, list[int]]] = {}
        self._asked = self.request
        shape = scheme.weight_scale_shape(out_features, in_features)
        codes = torch.zeros(out_features, in_features, dtype=torch.uint8, device=device)
        self._set("weight", codes.view(torch.float8_e4m3fn))
        self._set("weight_scale", torch.ones(shape, dtype=torch.float32, device=device))
        static = scheme.activation == "tensor" and not scheme.dynamic
        self._set("input_scale", torch.ones((), device=device) if static else None)
        self._set("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    def _set(self, name: str, value: torch.Tensor | None) -> None:
        old = self._parameters.pop(name, None)
        parameter = None
        if value is not None:
            parameter = torch.nn.Parameter(value, requires_grad=False)
            if old is not None:
                # engines hang their weight loaders on parameters
                parameter.__dict__.update(old.__dict__)
        self.register_parameter(name, parameter)

    def __getattr__(self, name: str) -> Any:
        # while prepared, the canonical form is computed on demand
        prepared = self.__dict__.get("_prepared")
        if prepared is not None and name in _CANONICAL:
            canonical = prepared.canonical()
            return canonical.data if name == "weight" else canonical.scale
        return super().__getattr__(name)

    @property
    def device(self) -> torch.device:
        """Where the weight lies."""
        if self._prepared is not None:
            return next(iter(self._prepared.tensors().values())).device
        weight = self._parameters["weight"]
        assert weight is not None
        return weight.device

    @property
    def nbytes(self) -> int:
        """Bytes that this layer holds now, as stored."""
        own = list(self.parameters(recurse=False))
        stored = self._prepared.nbytes if self._prepared is not None else 0
        return stored + sum(p.numel() * p.element_size() for p in own)

    @property
    def quantizes_activations(self) -> bool:
        """Whether a call with one row quantizes its activations on this device."""
        return self.plan().choice(1).quantizes

    def load(
        self,
        weight: QTensor,
        *,
        input_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        extras: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Take over a weight, also in place of one that is already prepared.

        Everything is checked before anything changes; what was prepared is prepared again.

        Args:
            weight: [N, K] codes with scales that fit the layer's scheme; moved to no other device.
            input_scale: fp32 with one element, required by static schemes.
            bias: [N], required exactly when the layer has one.
            extras: other scales of this layer (k_scale, v_scale): kept for saving.

        Raises:
            InputError: a shape, a missing scale, or a scale that is not positive and finite.
        """
        n, k = self.out_features, self.in_features
        if tuple(weight.data.shape) != (n, k):
            raise InputError(
                "the weight does not fit this layer",
                got=f"shape {tuple(weight.data.shape)}",
                want=f"({n}, {k})",
            )
        shape = self.scheme.weight_scale_shape(n, k)
        if weight.scale.numel() != torch.Size(shape).numel():
            raise InputError(
                f"the weight scale does not fit a {self.scheme.name} layer of {n}x{k}",
                got=f"shape {tuple(weight.scale.shape)}",
                want=f"{shape}",
            )
        scale = _positive("weight_scale", weight.scale).reshape(shape)
        if (self._parameters["input_scale"] is None) != (input_scale is None):
            raise InputError(
                f"a {self.scheme.name} layer and its input_scale",
                got="none" if input_scale is None else "one",
                want="one" if input_scale is None else "none",
                hint="a static scheme has one from calibration, no other scheme has any",
            )
        if (self._parameters["bias"] is None) != (bias is None):
            raise InputError(
                "the bias does not fit this layer",
                got="none" if bias is None else "one",
                want=f"a bias of [{n}]" if bias is None else "none",
            )
        if bias is not None and tuple(bias.shape) != (n,):
            raise InputError(
                "the bias does not fit this layer", got=str(tuple(bias.shape)), want=f"({n},)"
            )
        if input_scale is not None:
            input_scale = _positive("input_scale", input_scale).reshape(())
        old = (self._prepared, dict(self._parameters), dict(self._buffers))
        self._prepared = None
        self._known.clear()
        self._set("weight", weight.codes.view(torch.float8_e4m3fn))
        self._set("weight_scale", scale)
        self._set("input_scale", input_scale)
        self._set("bias", None if bias is None else bias.to(self.dtype))
        for name, value in (extras or {}).items():
            self._buffers.pop(name, None)
            self.register_buffer(name, value)
        if old[0] is not None:
            try:
                self.prepare()
            except BaseException:
                # out of memory, say: what worked before goes on working
                self._prepared, self._parameters, self._buffers = old
                raise

    def plan(self, x_dtype: torch.dtype | None = None) -> Plan:
        """The choices of this layer on its device, for activations of a dtype."""
        return plan_of(self._key(x_dtype or self.dtype), self.device)

    @property
    def key(self) -> str:
        """The facts that its plan depends on besides device and tables, as one string."""
        return self._key(self.dtype)

    def _key(self, x_dtype: torch.dtype) -> str:
        key = self._keys.get(x_dtype)
        if key is None:
            n, k, bias = self.out_features, self.in_features, self._parameters["bias"] is not None
            key = facts_of(self.scheme, n, k, x_dtype, bias, self._asked).key
            self._keys[x_dtype] = key
        return key

    def ask(self) -> None:
        """Read the environment: at preparation, and again when `replan` says so."""
        self._asked = self.request.with_environment()
        self._keys.clear()
        self._known.clear()
        for x_dtype in DTYPE_NAMES:
            # now, because a traced call must not come here for the first time
            self._key(x_dtype)

    def prepare(self) -> None:
        """Decide the backends and store the weight as they want it. Safe to call again.

        The environment is read here.

        Raises:
            InputError: no weight yet. DeviceError: inside a CUDA graph's capture.
        """
        if self._prepared is not None:
            return
        refuse_capture("a layer is prepared", "a first call")
        self.ask()
        PREPARED.add(self)
        if self.device.type == "meta":
            raise InputError(
                "this layer has no weight yet",
                got="device meta",
                hint="load() one",
                want="a loaded weight",
            )
        weight, scale = self._parameters["weight"], self._parameters["weight_scale"]
        assert weight is not None
        assert scale is not None
        self._prepared = self.plan().prepare(QTensor(weight.data, scale.data, self.scheme.block))
        self._stored = list(self._prepared.tensors().values())
        for name in _CANONICAL:
            del self._parameters[name]

    def unprepare(self) -> None:
        """Go back to the canonical weight; the next call prepares again."""
        if self._prepared is not None:
            canonical, self._prepared = self._prepared.canonical(), None
            self._set("weight", canonical.data)
            self._set("weight_scale", canonical.scale)
        self._stored = []
        self._known.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y = x · Wᵀ + bias: [..., K] bf16, fp16 or fp32 -> [..., N] of x's dtype."""
        if self._prepared is None:
            if torch.compiler.is_compiling():
                raise RuntimeError("call prepare() on this layer before torch.compile traces it")
            self.prepare()
        bias, input_scale = self._parameters["bias"], self._parameters["input_scale"]
        if torch.compiler.is_compiling():
            return traced_linear(x, self._stored, bias, input_scale, self._key(x.dtype))
        known = self._known.get(x.numel())
        y = None if known is None else known[0].again(x, known[1], bias, input_scale)
        return self._called(x, bias, input_scale) if y is None else y

    def _called(
        self, x: torch.Tensor, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> torch.Tensor:
        """A first call of this layer with so many rows, or one that nothing can repeat."""
        key, prepared = self._key(x.dtype), self._prepared
        call, plan = find(key, x), self.plan(x.dtype)
        assert prepared is not None
        if plan.layout != prepared.layout:
            # planned again since, and the new plan stores the weight differently
            self.unprepare()
            self.prepare()
            prepared = self._prepared
            assert prepared is not None
        if call is not None and call.replay is not None and call.layout == plan.layout:
            where = pointers_of(self._stored, call.device)
            if where is not None:
                self._known[x.numel()] = call, where
                y = call.again(x, where, bias, input_scale)
                if y is not None:
                    return y
        return in_full(key, plan, prepared, x, bias, input_scale)

    def extra_repr(self) -> str:
        bias = self._parameters["bias"] is not None
        text = f"{self.in_features}, {self.out_features}, bias={bias}, scheme={self.scheme.name}"
        if self._prepared is not None:
            text += f", backend={self.plan().choice(1).backend}"
        return text

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True):
        self.unprepare()
        scales = {"weight_scale", "input_scale", *self._buffers}
        for store in (self._parameters, self._buffers):
            for name, value in list(store.items()):
                if value is None:
                    continue
                plain = value.data
                if name == "weight":
                    moved = fn(plain.view(torch.uint8)).view(torch.float8_e4m3fn)
                elif name in scales and plain.dtype == torch.float32:
                    # an integer view moves between devices but escapes casts
                    moved = fn(plain.view(torch.int32)).view(torch.float32)
                else:
                    moved = fn(plain)
                    self.dtype = moved.dtype if name == "bias" else self.dtype
                if store is self._parameters:
                    self._set(name, moved)
                else:
                    store[name] = moved
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._prepared is not None:
            canonical = self._prepared.canonical()
            destination[prefix + "weight"] = canonical.data
            destination[prefix + "weight_scale"] = canonical.scale

    def _load_from_state_dict(
        self,
        state_dict: dict[str, torch.Tensor],
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {n: p for n, p in self._parameters.items() if p is not None}
        names = {*own, *_CANONICAL}
        found = {n: state_dict[prefix + n] for n in names if prefix + n in state_dict}
        missing = [prefix + n for n in sorted(names - set(found))]
        if missing:
            missing_keys.extend(missing)
            return
        if strict:
            known = {prefix + n for n in names | set(self._buffers)}
            unexpected_keys.extend(
                key for key in state_dict if key.startswith(prefix) and key not in known
            )
        weight = found["weight"]
        if weight.dtype not in (torch.float8_e4m3fn, torch.uint8):
            error_msgs.append(f"{prefix}weight is {weight.dtype}, not FP8: use anyfp8.convert")
            return
        where = None if self.device.type == "meta" else self.device
        values = {n: t.detach().clone().to(where or t.device) for n, t in found.items()}
        q = QTensor(values["weight"], values["weight_scale"], self.scheme.block)
        try:
            self.load(q, input_scale=values.get("input_scale"), bias=values.get("bias"))
        except InputError as error:
            error_msgs.append(f"{prefix}: {error}")

    def __getstate__(self) -> dict[str, Any]:
        # what was prepared is prepared again where the copy wakes up, for the device there;
        # codes travel as bytes: plain pickle does not know torch's FP8 storages
        state = self.__dict__.copy()
        parameters = dict(self._parameters)
        for name in _CANONICAL:
            parameters[name] = torch.nn.Parameter(getattr(self, name), requires_grad=False)
        codes = parameters["weight"].data.view(torch.uint8)
        parameters["weight"] = torch.nn.Parameter(codes, requires_grad=False)
        asleep = {"_stored": [], "_prepared": None, "_parameters": parameters, "_known": {}}
        return state | asleep | {"_wakes_prepared": self._prepared is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        wakes_prepared = state.pop("_wakes_prepared", False)
        super().__setstate__(state)
        self._set("weight", self._parameters["weight"].view(torch.float8_e4m3fn))
        if wakes_prepared:
            self.prepare()


def _positive(name: str, scale: torch.Tensor) -> torch.Tensor:
    scale = scale.detach().float()
    if scale.device.type != "meta" and not bool(((scale > 0) & scale.isfinite()).all()):
        bad = scale.flatten()[~((scale > 0) & scale.isfinite()).flatten()][0]
        raise InputError(
            f"{name} holds a value that is no scale",
            got=f"{float(bad):g}",
            want="finite values above zero",
            hint="the checkpoint was probably written without calibration",
        )
    return scale.contiguous()
