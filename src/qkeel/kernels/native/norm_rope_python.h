// Norm and rotation of q and k as a Python function that calls no dispatcher, whose price is most of what one token
// costs. It takes plain tensors of a CPU where no transform, mode, tracer or tangent is about, and returns None for all
// others; the operators do those.
#pragma once
#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace {

bool within(c10::DispatchKeySet keys, c10::DispatchKeySet usual) { return !(keys.raw_repr() & ~usual.raw_repr()); }

bool alone() {
  const c10::DispatchKeySet usual = c10::default_included_set | c10::autocast_dispatch_keyset;
  return within(c10::impl::tls_local_dispatch_key_set().included_, usual) && !at::impl::torch_function_mode_enabled();
}

bool plain(const Tensor& x) {
  const c10::DispatchKeySet usual{c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutocastCPU,
                                  c10::DispatchKey::ADInplaceOrView};
  return within(x.key_set(), usual) && !x._fw_grad(0).defined();
}

bool held(const Tensor& x) {
  const at::ScalarType kind = x.scalar_type();
  return plain(x) && x.dim() == 4 && x.numel() > 0 && x.size(3) % 8 == 0 && x.size(3) <= WIDEST &&
      (kind == at::kFloat || kind == at::kBFloat16 || kind == at::kHalf);
}

// Whether x is all of its memory, so that what is written to it is nobody else's.
bool whole(const Tensor& x) {
  return x.is_non_overlapping_and_dense() && x.stride(3) == 1 && x.storage().nbytes() == x.numel() * x.itemsize();
}

bool taken(PyObject* from, Maybe& to) {
  if (from == Py_None) return true;
  if (!THPVariable_CheckExact(from)) return false;
  to = THPVariable_Unpack(from);
  return plain(*to);
}

Tensor one(const Tensor& x, const Maybe& gain, const Maybe& cos, const Maybe& sin, int64_t kind, double eps,
           bool in_place) {
  if (at::GradMode::is_enabled() && (x.requires_grad() || (gain && gain->requires_grad())))
    return Forward::apply(x, gain, cos, sin, kind, eps, false, in_place)[0];
  if (in_place && !x.is_inference()) torch::autograd::impl::bump_version(x);
  return std::get<0>(run(in_place ? x.variable_data() : x, gain, cos, sin, kind, eps, false, in_place));
}

// encode(q, k, gain_q, gain_k, cos, sin, kind_q, kind_k, eps, in_place) -> (q, k) or None
PyObject* encode(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 10) return PyErr_Format(PyExc_TypeError, "encode takes 10 arguments, got %zd", count);
  HANDLE_TH_ERRORS
  if (!alone() || !THPVariable_CheckExact(given[0]) || !THPVariable_CheckExact(given[1])) Py_RETURN_NONE;
  const Tensor &q = THPVariable_Unpack(given[0]), &k = THPVariable_Unpack(given[1]);
  Maybe gain_q, gain_k, cos, sin;
  if (!held(q) || !held(k) || !taken(given[2], gain_q) || !taken(given[3], gain_k) || !taken(given[4], cos) ||
      !taken(given[5], sin))
    Py_RETURN_NONE;
  const long kind_q = PyLong_AsLong(given[6]), kind_k = PyLong_AsLong(given[7]);
  const double eps = PyFloat_AsDouble(given[8]);
  if (PyErr_Occurred()) return nullptr;
  const bool in_place = given[9] == Py_True && whole(q) && whole(k) && !q.is_alias_of(k);
  // A gradient out of place is the operators', which compilers and hooks on saved tensors know.
  const bool wanted = at::GradMode::is_enabled() &&
      (q.requires_grad() || k.requires_grad() || (gain_q && gain_q->requires_grad()) || (gain_k && gain_k->requires_grad()));
  if (wanted && !in_place) Py_RETURN_NONE;
  PyObject* found = PyTuple_New(2);
  if (!found) return nullptr;
  try {
    PyTuple_SET_ITEM(found, 0, THPVariable_Wrap(one(q, gain_q, cos, sin, kind_q, eps, in_place)));
    PyTuple_SET_ITEM(found, 1, THPVariable_Wrap(one(k, gain_k, cos, sin, kind_k, eps, in_place)));
  } catch (...) {
    Py_DECREF(found);
    throw;
  }
  return found;
  END_HANDLE_TH_ERRORS
}

// place(pos) -> the whole number that is all a plain tensor of a CPU holds, or None
PyObject* place(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  if (!THPVariable_CheckExact(given)) Py_RETURN_NONE;
  const Tensor& pos = THPVariable_Unpack(given);
  if (!alone() || !plain(pos) || pos.numel() != 1 || pos.scalar_type() != at::kLong) Py_RETURN_NONE;
  return PyLong_FromLongLong(*pos.const_data_ptr<int64_t>());
  END_HANDLE_TH_ERRORS
}

PyMethodDef FUNCTIONS[] = {
    {"encode", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(encode)), METH_FASTCALL, nullptr},
    {"place", place, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "norm_rope", nullptr, -1, FUNCTIONS, nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit_norm_rope() { return PyModule_Create(&MODULE); }
