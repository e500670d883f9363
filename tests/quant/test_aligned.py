"""Products and views as a GPU learns with: values and gradients of the plain ones, laid out well."""

import pytest
import torch
from torch import Tensor

from fimaq.quant.aligned import filled_product, unbind


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "spare"), [(0, 0), (3, 0), (0, 2), (1, 4)])
def test_zeros_change_no_product_and_no_gradient(transposed, rows, spare):
    left, right = normal(2, 3, 5, 6), normal(2, 3, 7, 6) if transposed else normal(2, 3, 6, 7)
    sent = torch.randn(2, 3, 5, 7 + spare, dtype=torch.float64)
    operand = right.mT if transposed else right
    filled = torch.nn.functional.pad(left, (0, rows))
    found = filled_product(filled, operand, spare)
    expected = left @ operand
    assert found.shape == sent.shape
    torch.testing.assert_close(found[..., :7], expected)
    assert (found[..., 7:] == 0).all()
    of_found = torch.autograd.grad(found, (left, right), sent)
    of_expected = torch.autograd.grad(expected, (left, right), sent[..., :7])
    torch.testing.assert_close(of_found, of_expected)


def test_the_gradient_of_a_transposed_operand_lies_in_memory_as_it_does():
    left, right = normal(2, 5, 6), normal(2, 7, 6)
    filled_product(left, right.mT, 0).sum().backward()
    assert right.grad.stride() == right.stride()


def test_operands_of_other_heads_are_broadcast():
    left, right = normal(2, 3, 5, 6), normal(2, 1, 7, 6)
    torch.testing.assert_close(filled_product(left, right.mT, 0), left @ right.mT)


def test_products_and_gradients_have_the_type_that_autocast_multiplies_in():
    left, right = (normal(2, 5, 6).float().detach().requires_grad_() for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = filled_product(left, right.mT, 0), left @ right.mT
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    sent = torch.randn_like(found)
    of_found, of_expected = (torch.autograd.grad(out, (left, right), sent) for out in (found, expected))
    torch.testing.assert_close(of_found, of_expected, rtol=0.01, atol=0.01)
    assert all(gradient.dtype == torch.float32 for gradient in of_found)


ORDERS = {
    "queries, keys and values": ((2, 0, 3, 1, 4), 0),
    "as it is": ((0, 1, 2, 3, 4), 2),
    "last": ((1, 0, 4, 3, 2), -1),
}


@pytest.mark.parametrize(("order", "dim"), ORDERS.values(), ids=ORDERS)
def test_an_unbound_view_has_the_gradient_of_unbind_in_the_order_of_memory(order, dim):
    whole = normal(2, 5, 3, 4, 6)
    view = whole.permute(order)
    parts, expected = unbind(view, dim), view.unbind(dim)
    assert len(parts) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(parts, expected, strict=True))
    sent = [torch.randn_like(part) for part in parts[:-1]]  # one of them is not used
    (found,) = torch.autograd.grad(parts[:-1], whole, sent)
    (reference,) = torch.autograd.grad(expected[:-1], whole, sent)
    assert torch.equal(found, reference)
    assert found.is_contiguous()
