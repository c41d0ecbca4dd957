"""A scalar made of log-probabilities, with its gradients in the forward.

Once all log-probabilities are known, so are their cotangents: the caller's function is
differentiated in the forward. If the exponentials of all logits are still there, in the memory of
`dweight` (`loss/mosaic_gpu/in_place.py`), the gradients need no logits: three GEMMs. The entropy's
gradient takes a pass over the exponentials, which reads and writes 2 bytes for each token and
column. Without the exponentials the forward computes the logits again: four GEMMs.

The function sees the numbers of all tokens. Where tokens are split over devices, each device
gathers 4 bytes a token for the log-probabilities, and as much for the entropies. It calls the
function on all of them, and takes the cotangents of its own tokens.

With `counted_fraction` the tokens that count are computed in fewer rows (`loss/counted.py`). The
function gets 0 for the others. Devices gather inside of the branch, so all of them take the same
one: they compute few rows if the tokens that count fit on each device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_kernels.layout import Place, Replicated, Weight, of_all_tokens, of_own_tokens
from pallas_kernels.log_probs.differentiable import Device
from pallas_kernels.log_probs.kept import KeptExponentials, keeps_all
from pallas_kernels.log_probs.of_function import OfFunction
from pallas_kernels.loss.columns import Columns, Gradients
from pallas_kernels.loss.counted import FewRows, for_few_or_all
from pallas_kernels.loss.differentiable import wanted_gradients, weight_and_bias
from pallas_kernels.loss.token_loss import IGNORED
from pallas_kernels.mapping import Mask
from pallas_kernels.protocol import Arrays


@dataclasses.dataclass(frozen=True, slots=True)
class OfAllTokens(OfFunction):
    """Results of a function of all log-probabilities."""

    def roles(
        self, num_axes: int, data: Arrays
    ) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Data are whole on each device, and so are results and gradients of data."""
        of_data = [Weight(tuple(f"data{axis}" for axis in range(a.ndim))) for a in data]
        results = [Replicated(("",) * len(a.shape)) for a in self.function.results]
        return of_data, results, [Replicated(("",) * a.ndim) for a in data]

    def on_device(self, wanted: Mask | None, place: Place) -> Callable[..., Arrays]:
        """Calls the function once, with the numbers of all devices."""
        request, function = self.request, self.function
        with_entropy, of_arrays = function.with_entropy, self.of_arrays(wanted)

        def run(*arrays) -> Arrays:
            x, weight, labels, *last = arrays[: self.num_arrays]
            data = arrays[self.num_arrays :]
            flat_x, flat_labels = x.reshape(labels.size, x.shape[-1]), labels.reshape(-1)
            weight, bias = weight_and_bias(request, x, weight, last)

            def compute(few: FewRows | None) -> list[jax.Array]:
                take = lambda a, fill: a if few is None else few.take(a, fill)
                put_back = lambda a: a if few is None else few.put_back(a)
                of_rows = take(flat_x, 0), weight, bias, take(flat_labels, IGNORED)
                device = Device.make(request, self.temperature, place, *of_rows)
                stored = None
                if of_arrays[1] and keeps_all(device.request, device.plan):
                    columns = Columns.make(device.request.settings, weight.astype(x.dtype), None)
                    stored = KeptExponentials.make(device, columns, with_entropy=with_entropy)
                    lse, own = stored.lse, stored.of_labels()
                else:
                    lse, own = device.log_probs(with_entropy=with_entropy)
                numbers = [of_all_tokens(put_back(a).reshape(labels.shape), place) for a in own]
                if wanted is None:
                    loss, aux = function(numbers, data)
                    return [loss, *aux]
                results, of_numbers, of_data = function.differentiated(
                    numbers, data, self.of_data(wanted)
                )
                cotangents = [take(of_own_tokens(a, place).reshape(-1), 0) for a in of_numbers]
                terms = device.terms(lse, *cotangents, *own[1:])
                of_x, of_weights = [], []
                if any(of_arrays):
                    if stored is not None:
                        dx, dweight = stored.gradients(terms)
                        found = Gradients(dx, stored.columns.without_padding(dweight), None)
                    else:
                        found = device.gradients(terms, of_arrays)
                    of_x, of_weights = wanted_gradients(
                        device.request, found, of_arrays, place, is_unchecked=self.is_unchecked
                    )
                of_x = [put_back(a).reshape(x.shape) for a in of_x]
                return [*results, *of_x, *of_weights, *of_data]

            counts, fraction = flat_labels != IGNORED, request.counted_fraction
            return for_few_or_all(
                compute, counts, fraction, place, name=self.name, agreeing=place.tokens
            )

        return run
