// The Python binding of assemble_scan, in CPython's limited API: one build
// serves Python 3.10 and later.
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <map>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "hlo.h"
#include "scan.h"

namespace {

// A Python exception is already set. Unwinds C++ frames up to the binding.
struct PythonError {};

struct Release {
  void operator()(PyObject* object) const { Py_DecRef(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

Owned own(PyObject* object) {
  if (object == nullptr) throw PythonError();
  return Owned(object);
}

// Runs `compute` and turns every C++ exception into a Python one.
template <typename Compute>
PyObject* guarded(Compute compute) {
  try {
    return compute().release();
  } catch (const PythonError&) {
  } catch (const scan_hlo::InputError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "unknown C++ exception");
  }
  return nullptr;
}

// As PyLong_AsLongLong, but an integer too large is a ValueError like any other bad value.
int64_t to_int64(PyObject* object, const char* what) {
  const long long value = PyLong_AsLongLong(object);
  if (value != -1 || PyErr_Occurred() == nullptr) return value;
  if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
    PyErr_Format(PyExc_ValueError, "%s does not fit in 64 bits", what);
  }
  throw PythonError();
}

std::vector<int64_t> to_roles(PyObject* sequence) {
  const Py_ssize_t size = PySequence_Size(sequence);
  if (size < 0) throw PythonError();
  std::vector<int64_t> roles;
  for (Py_ssize_t k = 0; k < size; ++k) {
    const Owned item = own(PySequence_GetItem(sequence, k));
    roles.push_back(to_int64(item.get(), "a role"));
  }
  return roles;
}

Owned to_str(std::string_view text) {
  return own(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

void set_item(const Owned& dict, const char* key, const Owned& value) {
  if (PyDict_SetItemString(dict.get(), key, value.get()) < 0) throw PythonError();
}

Owned to_list(const std::vector<int64_t>& values) {
  Owned list = own(PyList_New(0));
  for (int64_t value : values) {
    if (PyList_Append(list.get(), own(PyLong_FromLongLong(value)).get()) < 0) throw PythonError();
  }
  return list;
}

// {"name", "id", "entry", "opcodes": {opcode: count}, "calls": [(opcode, [id, ...])]}
Owned to_dict(const scan_hlo::ComputationView& computation, bool entry) {
  std::map<std::string_view, long long> counts;
  Owned calls = own(PyList_New(0));
  for (const scan_hlo::InstructionView& instruction : computation.instructions) {
    ++counts[instruction.opcode];
    if (instruction.called.empty()) continue;
    const Owned opcode = to_str(instruction.opcode);
    const Owned call = own(PyTuple_Pack(2, opcode.get(), to_list(instruction.called).get()));
    if (PyList_Append(calls.get(), call.get()) < 0) throw PythonError();
  }
  Owned opcodes = own(PyDict_New());
  for (const auto& [opcode, count] : counts) {
    const Owned number = own(PyLong_FromLongLong(count));
    if (PyDict_SetItem(opcodes.get(), to_str(opcode).get(), number.get()) < 0) throw PythonError();
  }
  Owned dict = own(PyDict_New());
  set_item(dict, "name", to_str(computation.name));
  set_item(dict, "id", own(PyLong_FromLongLong(computation.id)));
  set_item(dict, "entry", own(PyBool_FromLong(entry)));
  set_item(dict, "opcodes", opcodes);
  set_item(dict, "calls", calls);
  return dict;
}

PyObject* py_assemble_scan(PyObject*, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"body", "n_carry", "length", "reverse", "roles", "name", nullptr};
  const char* body = nullptr;
  Py_ssize_t body_size = 0;
  PyObject *n_carry = nullptr, *length = nullptr, *roles = nullptr;
  int reverse = 0;
  const char* name = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y#OOpOs:assemble_scan", const_cast<char**>(names), &body,
                                   &body_size, &n_carry, &length, &reverse, &roles, &name)) {
    return nullptr;
  }
  return guarded([&] {
    scan_hlo::ScanSpec spec;
    spec.n_carry = to_int64(n_carry, "n_carry");
    spec.length = to_int64(length, "length");
    spec.reverse = reverse != 0;
    spec.roles = to_roles(roles);
    spec.name = name;
    const std::string module = scan_hlo::assemble_scan({body, static_cast<size_t>(body_size)}, spec);
    return own(PyBytes_FromStringAndSize(module.data(), static_cast<Py_ssize_t>(module.size())));
  });
}

PyObject* py_computations(PyObject*, PyObject* args) {
  const char* bytes = nullptr;
  Py_ssize_t size = 0;
  if (!PyArg_ParseTuple(args, "y#:computations", &bytes, &size)) return nullptr;
  return guarded([&] {
    const scan_hlo::ModuleView module = scan_hlo::read_module({bytes, static_cast<size_t>(size)});
    Owned list = own(PyList_New(0));
    for (const scan_hlo::ComputationView& computation : module.computations) {
      const Owned dict = to_dict(computation, computation.id == module.entry_id);
      if (PyList_Append(list.get(), dict.get()) < 0) throw PythonError();
    }
    return list;
  });
}

PyMethodDef methods[] = {
    {"assemble_scan", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(py_assemble_scan)),
     METH_VARARGS | METH_KEYWORDS,
     "assemble_scan(body, n_carry, length, reverse, roles, name) -> bytes\n\n"
     "The HLO module of a scan, from the HLO module of its body."},
    {"computations", py_computations, METH_VARARGS,
     "computations(module) -> list of dicts\n\n"
     "Name, id, opcode counts and calls of every computation of an HLO module."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef_Slot slots[] = {{0, nullptr}};  // stateless: multi-phase init without steps

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_C", "Assembles HLO While loops around the HLO of a scan's body.", 0, methods, slots,
    nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return PyModuleDef_Init(&definition); }
