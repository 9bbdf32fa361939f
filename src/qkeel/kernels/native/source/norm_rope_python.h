// Norm and rotation of q and k as a Python function that calls no dispatcher: for one token the dispatcher takes most of
// the time. It computes plain tensors of a CPU under no transform, mode, tracer or tangent, and returns None for all
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

bool taken(PyObject* from, Maybe& to) {
  if (from == Py_None) return true;
  if (!THPVariable_CheckExact(from)) return false;
  to = THPVariable_Unpack(from);
  return plain(*to);
}

// encode(q, k, gain_q, gain_k, cos, sin, kind_q, kind_k, eps) -> (q, k) or None
PyObject* encode(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 9) return PyErr_Format(PyExc_TypeError, "encode takes 9 arguments, got %zd", count);
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
  // A gradient is the operators', which compilers and hooks on saved tensors know.
  const bool wanted = at::GradMode::is_enabled() &&
      (q.requires_grad() || k.requires_grad() || (gain_q && gain_q->requires_grad()) || (gain_k && gain_k->requires_grad()));
  if (wanted) Py_RETURN_NONE;
  PyObject* found = PyTuple_New(2);
  if (!found) return nullptr;
  try {
    PyTuple_SET_ITEM(found, 0, THPVariable_Wrap(std::get<0>(run(q, gain_q, cos, sin, kind_q, eps, false))));
    PyTuple_SET_ITEM(found, 1, THPVariable_Wrap(std::get<0>(run(k, gain_k, cos, sin, kind_k, eps, false))));
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
