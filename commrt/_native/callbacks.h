// Python callables as a port: `context` is a cffi handle of the connection.
// CDEF BEGIN
extern "Python" {
  int cr_py_put(void*, unsigned long long, const void*, unsigned long long);
  int cr_py_signal(void*, unsigned long long, unsigned long long);
  int cr_py_get(void*, void*, unsigned long long, unsigned long long);
  int cr_py_flush(void*);
  int cr_py_poll(void*);
}
// CDEF END
