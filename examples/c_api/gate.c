/* forebay in C: native threads that decide without the GIL. `setup.py` builds it as the module `gate`.
 *
 *     import gate
 *     gate.run(limiter, b"user:42", threads=4, requests=1_000_000)    # -> (allowed, denied, "the store was closed")
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <forebay.h>
#include <pthread.h>

#define MOST_THREADS 64

static const forebay_api *forebay;

typedef struct worker {
    forebay_limiter *limiter;
    const char *key;
    Py_ssize_t key_size;
    long long requests;
    long long allowed, denied;
    int32_t status; /* FOREBAY_OK, or the error that ended the thread */
} worker;

/* Runs in a thread that Python has never heard of. */
static void *work(void *argument) {
    worker *self = argument;
    forebay_thread *mine;
    long long i;
    self->status = forebay->attach(self->limiter, &mine);
    if (self->status < 0) return NULL;
    for (i = 0; i < self->requests; i++) {
        int32_t answer = forebay->allow(mine, self->key, (size_t)self->key_size);
        if (answer < 0) {
            self->status = answer;
            break;
        }
        self->allowed += answer == FOREBAY_ALLOWED;
        self->denied += answer == FOREBAY_DENIED;
    }
    forebay->detach(mine);
    return NULL;
}

static void run_threads(worker *workers, int threads) {
    pthread_t started[MOST_THREADS];
    int i, count = 0;
    while (count < threads && pthread_create(&started[count], NULL, work, &workers[count]) == 0)
        count++;
    for (i = 0; i < count; i++)
        pthread_join(started[i], NULL);
    for (i = count; i < threads; i++)
        workers[i].status = FOREBAY_NO_MEMORY;
}

static PyObject *run(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"limiter", "key", "threads", "requests", NULL};
    PyObject *object;
    worker workers[MOST_THREADS];
    worker sum = {0};
    int i, threads;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oy#iL", names, &object, &sum.key, &sum.key_size, &threads,
                                     &sum.requests))
        return NULL;
    if (threads < 1 || threads > MOST_THREADS) {
        PyErr_SetString(PyExc_ValueError, "threads is 1 to 64");
        return NULL;
    }
    sum.status = forebay->limiter_open(object, &sum.limiter);
    if (sum.status < 0) {
        PyErr_SetString(PyExc_ValueError, forebay->message(sum.status));
        return NULL;
    }
    for (i = 0; i < threads; i++)
        workers[i] = sum;
    Py_BEGIN_ALLOW_THREADS run_threads(workers, threads);
    Py_END_ALLOW_THREADS for (i = 0; i < threads; i++) {
        sum.allowed += workers[i].allowed;
        sum.denied += workers[i].denied;
        if (workers[i].status < 0) sum.status = workers[i].status;
    }
    forebay->limiter_close(sum.limiter);
    return Py_BuildValue("LLs", sum.allowed, sum.denied, sum.status < 0 ? forebay->message(sum.status) : NULL);
}

static PyMethodDef functions[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_VARARGS | METH_KEYWORDS,
     "run(limiter, key, threads, requests): decide so many requests in each thread.\n\n"
     "Returns how many were allowed, how many denied, and the error that ended a thread or None."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "gate", "Native threads that decide without the GIL.", -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_gate(void) {
    PyObject *module;
    forebay = forebay_import();
    if (forebay == NULL) return NULL;
    module = PyModule_Create(&definition);
#ifdef Py_GIL_DISABLED
    /* Without it, importing the module switches the GIL on again. */
    if (module != NULL) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
    return module;
}
