// The short way in from Python: blocking calls on numpy arrays by the interpreter's own calling convention, without a
// frame, a conversion or an allocation. A second module, `_calls`, in the library of `_core`.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "numpy_arrays.h"

using namespace commrt;

namespace {

thread_local cr_launch* last_pending;

enum Argument { COLLECTIVE_ARG, OP_ARG, ROOT_ARG, X_ARG, OUT_ARG, ARGUMENTS };
constexpr const char* OPERATORS[] = {"sum", "prod", "min", "max", "avg"};
constexpr u32 NO_OPERATOR = sizeof OPERATORS / sizeof *OPERATORS;
PyObject* operators[NO_OPERATOR];  // interned: written once, at import

struct ShortWay {
  PyObject_HEAD
  vectorcallfunc call;
  cr_lane* lane;
  PyObject* arrays;    // numpy's array class while the way is open
  PyObject* otherwise; // called where a call has not ended, or not well
};

u32 operator_code(PyObject* name) {
  u32 code = 0;
  while (code < NO_OPERATOR && operators[code] != name) code++;
  return code;
}

int run_lane(const ShortWay& way, u32 collective, u32 reduction, u32 root, PyObject* x, PyObject* out) {
  int answer;
  Py_BEGIN_ALLOW_THREADS
  answer = collective == BARRIER_OF
               ? run_barrier(*way.lane, &last_pending)
               : run_on_arrays(*way.lane, collective, reduction, root, x + 1, out + 1, &last_pending);
  Py_END_ALLOW_THREADS
  return answer;
}

int attempt(const ShortWay& way, PyObject* const* args) {
  u32 collective = (u32)PyLong_AsLong(args[COLLECTIVE_ARG]), reduction = operator_code(args[OP_ARG]);
  if (reduction == NO_OPERATOR || !PyLong_CheckExact(args[ROOT_ARG]) || way.arrays == Py_None) return CR_UNFIT;
  int beyond;
  long root = PyLong_AsLongAndOverflow(args[ROOT_ARG], &beyond);
  if (beyond || root < 0 || root > INT32_MAX) return CR_UNFIT;
  PyObject *x = args[X_ARG], *out = args[OUT_ARG];
  if (collective != BARRIER_OF && ((PyObject*)Py_TYPE(x) != way.arrays || (PyObject*)Py_TYPE(out) != way.arrays)) return CR_UNFIT;
  return run_lane(way, collective, reduction, (u32)root, x, out);
}

PyObject* call(PyObject* self, PyObject* const* args, size_t nargs, PyObject* keywords) {
  const ShortWay& way = *(ShortWay*)self;
  if (PyVectorcall_NARGS(nargs) != ARGUMENTS || keywords)
    return PyErr_Format(PyExc_TypeError, "expected (collective, op, root, x, out)");
  int answer = attempt(way, args);
  if (PyErr_Occurred()) return nullptr;
  if (answer == CR_OK) Py_RETURN_TRUE;
  if (answer == CR_UNFIT || answer == CR_NEED_PLAN || answer == CR_INVALID || answer == CR_ELSEWHERE) Py_RETURN_FALSE;
  return PyObject_CallFunction(way.otherwise, "iOO", answer, args[X_ARG], args[OUT_ARG]);
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  unsigned long long lane;
  PyObject* otherwise;
  if (!PyArg_ParseTuple(args, "KO", &lane, &otherwise)) return nullptr;
  ShortWay* way = (ShortWay*)type->tp_alloc(type, 0);
  if (!way) return nullptr;
  way->call = call;
  way->lane = (cr_lane*)lane;
  Py_INCREF(way->arrays = Py_None);
  Py_INCREF(way->otherwise = otherwise);
  return (PyObject*)way;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(((ShortWay*)self)->arrays);
  Py_VISIT(((ShortWay*)self)->otherwise);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(((ShortWay*)self)->arrays);
  Py_CLEAR(((ShortWay*)self)->otherwise);
  return 0;
}

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef members[] = {
    {"arrays", T_OBJECT_EX, offsetof(ShortWay, arrays), 0, "numpy.ndarray while the way is open, else None"},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(ShortWay, call), READONLY, nullptr},
    {},
};
PyType_Slot slots[] = {
    {Py_tp_doc, (void*)"ShortWay(lane, otherwise): see _calls.pyi"},
    {Py_tp_new, (void*)make},
    {Py_tp_call, (void*)PyVectorcall_Call},
    {Py_tp_traverse, (void*)traverse},
    {Py_tp_clear, (void*)clear},
    {Py_tp_dealloc, (void*)destroy},
    {Py_tp_members, members},
    {},
};
PyType_Spec spec{"commrt._native._calls.ShortWay", sizeof(ShortWay), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};
PyModuleDef module{PyModuleDef_HEAD_INIT, "commrt._native._calls", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" {

cr_launch* cr_pending(void) { return last_pending; }

PyMODINIT_FUNC PyInit__calls(void) {
  for (u32 k = 0; k < NO_OPERATOR; k++)
    if (!(operators[k] = PyUnicode_InternFromString(OPERATORS[k]))) return nullptr;
  PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&spec);
  if (!made || !type || PyModule_AddObject(made, "ShortWay", type)) return nullptr;
  return made;
}
}
