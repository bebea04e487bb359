// Sequences with the memory that they need, as ops/te/steps.py arranges them.
#pragma once

#include <pybind11/stl.h>

#include "calls.h"

// Memory is a Python object with data_ptr(), or the address itself. It is known by its place in the list `memories`.
class Steps {
 public:
  // What lies in other memory, as (index, offset).
  using Pieces = std::vector<std::pair<size_t, uintptr_t>>;
  // The arguments of an allocation, None for none, and what lies in it.
  using Whole = std::tuple<py::object, Pieces>;
  // What to allocate, as (index, arguments); a Sequence or a Python function; where the function's result goes, -1 for
  // nowhere; what nobody uses afterwards.
  using Step = std::tuple<std::vector<std::pair<size_t, py::tuple>>, py::object, int64_t, std::vector<size_t>>;

  Steps(Whole kept, Pieces temporary, std::vector<Step> steps)
      : kept_(std::move(kept)), temporary_(std::move(temporary)), steps_(std::move(steps)) {
    for (const Step& step : steps_) {
      const py::object& run = std::get<1>(step);
      sequences_.push_back(py::isinstance<Sequence>(run) ? &run.cast<const Sequence&>() : nullptr);
    }
  }

  // allocate(*arguments): memory. temporary: in which what is temporary lies, or None. What is kept is memories[0],
  // given or allocated here.
  void run(const py::list& memories, const py::object& allocate, const py::object& temporary) const {
    Bases bases(memories.size());
    for (size_t i = 0; i < memories.size(); i++) bases.set(i, address(PyList_GET_ITEM(memories.ptr(), i)));
    const auto put = [&](size_t index, py::object memory) {
      bases.set(index, address(memory.ptr()));
      memories[index] = std::move(memory);
    };
    const auto& [of_kept, kept] = kept_;
    if (!of_kept.is_none()) put(0, allocate(*of_kept));
    locate(bases, address(PyList_GET_ITEM(memories.ptr(), 0)), kept);
    locate(bases, address(temporary.ptr()), temporary_);
    for (size_t i = 0; i < steps_.size(); i++) {
      const auto& [allocated, function, result, ends] = steps_[i];
      for (const auto& [index, arguments] : allocated) put(index, allocate(*arguments));
      if (sequences_[i]) {
        sequences_[i]->run(bases);
      } else {
        py::object made = function(memories);
        if (result >= 0) put(result, std::move(made));
      }
      for (size_t index : ends) memories[index] = py::none();
    }
  }

 private:
  static uintptr_t address(PyObject* memory) {
    if (memory == Py_None) return 0;
    if (PyLong_CheckExact(memory)) return to_integer(memory);
    static PyObject* name = PyUnicode_InternFromString("data_ptr");
    PyObject* address = PyObject_CallMethodNoArgs(memory, name);
    if (!address) throw py::error_already_set();
    return to_integer(py::reinterpret_steal<py::object>(address).ptr());
  }
  static void locate(Bases& bases, uintptr_t base, const Pieces& pieces) {
    for (const auto& [index, offset] : pieces) bases.set(index, base + offset);
  }

  Whole kept_;
  Pieces temporary_;
  std::vector<Step> steps_;
  std::vector<const Sequence*> sequences_;  // null for a Python function
};
