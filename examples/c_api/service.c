/* forebay in C: native threads that serve a request only if there is a free place, and all limits allow it. `setup.py`
 * builds it as the module `service`.
 *
 *     import service
 *     service.run(places, (per_user, for_all), b"user:42", threads=4, requests=1000)
 *     # -> (served, limited, busy, the least time until a limited request may come again in ns, an error or None)
 *
 * `places` is a Concurrency, the others are limiters of its store.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <forebay.h>
#include <pthread.h>

#define MOST_THREADS 64

static const forebay_api *forebay;

typedef struct worker {
    forebay_limiter *places;
    forebay_limiter *limiters[FOREBAY_MOST_LIMITS];
    Py_ssize_t limits;
    const char *key;
    Py_ssize_t key_size;
    long long requests;
    long long served, limited, busy;
    uint64_t retry_after_ns;
    int32_t status; /* FOREBAY_OK, or the error that ended the thread */
} worker;

/* One request. A place is taken first, because it can be given back without a trace. */
static int32_t serve(worker *self, forebay_thread *places, forebay_thread **threads, const forebay_request *requests) {
    forebay_lease lease;
    forebay_result binding;
    int32_t answer = forebay->acquire(places, &requests[0], &lease);
    if (answer != FOREBAY_ALLOWED) {
        self->busy += answer == FOREBAY_DENIED;
        return answer;
    }
    answer = forebay->decide_all(threads, requests, (size_t)self->limits, &binding, NULL);
    if (answer == FOREBAY_ALLOWED) {
        self->served++; /* here the work would be done */
    } else if (answer == FOREBAY_DENIED) {
        self->limited++;
        if (binding.retry_after_ns < self->retry_after_ns) self->retry_after_ns = binding.retry_after_ns;
    }
    forebay->release(places, &lease);
    return answer;
}

static int32_t attach_all(worker *self, forebay_thread **places, forebay_thread **threads) {
    Py_ssize_t i;
    int32_t status = forebay->attach(self->places, places);
    for (i = 0; i < self->limits && status == FOREBAY_OK; i++)
        status = forebay->attach(self->limiters[i], &threads[i]);
    return status;
}

/* Runs in a thread that Python has never heard of. */
static void *work(void *argument) {
    worker *self = argument;
    forebay_thread *places = NULL, *threads[FOREBAY_MOST_LIMITS] = {NULL};
    forebay_request requests[FOREBAY_MOST_LIMITS] = {{0}};
    long long turn;
    Py_ssize_t i;
    for (i = 0; i < self->limits; i++) {
        requests[i].key = self->key;
        requests[i].key_size = (uint64_t)self->key_size;
        requests[i].cost = 1;
    }
    self->status = attach_all(self, &places, threads);
    for (turn = 0; turn < self->requests && self->status >= 0; turn++)
        self->status = serve(self, places, threads, requests);
    forebay->detach(places);
    for (i = 0; i < self->limits; i++)
        forebay->detach(threads[i]);
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

static int32_t open_all(worker *all, PyObject *places, PyObject *limiters) {
    Py_ssize_t i;
    int32_t status = forebay->limiter_open(places, &all->places);
    for (i = 0; i < all->limits && status == FOREBAY_OK; i++)
        status = forebay->limiter_open(PyTuple_GET_ITEM(limiters, i), &all->limiters[i]);
    return status;
}

static void close_all(worker *all) {
    Py_ssize_t i;
    forebay->limiter_close(all->places);
    for (i = 0; i < all->limits; i++)
        forebay->limiter_close(all->limiters[i]);
}

static PyObject *run(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"places", "limiters", "key", "threads", "requests", NULL};
    PyObject *places, *limiters;
    worker workers[MOST_THREADS];
    worker sum = {.retry_after_ns = UINT64_MAX};
    int i, threads;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!y#iL", names, &places, &PyTuple_Type, &limiters, &sum.key,
                                     &sum.key_size, &threads, &sum.requests))
        return NULL;
    sum.limits = PyTuple_GET_SIZE(limiters);
    if (threads < 1 || threads > MOST_THREADS || sum.limits < 1 || sum.limits > FOREBAY_MOST_LIMITS) {
        PyErr_SetString(PyExc_ValueError, "threads is 1 to 64, and there are 1 to 16 limiters");
        return NULL;
    }
    sum.status = open_all(&sum, places, limiters);
    if (sum.status == FOREBAY_OK) {
        for (i = 0; i < threads; i++)
            workers[i] = sum;
        Py_BEGIN_ALLOW_THREADS run_threads(workers, threads);
        Py_END_ALLOW_THREADS for (i = 0; i < threads; i++) {
            sum.served += workers[i].served;
            sum.limited += workers[i].limited;
            sum.busy += workers[i].busy;
            if (workers[i].retry_after_ns < sum.retry_after_ns) sum.retry_after_ns = workers[i].retry_after_ns;
            if (workers[i].status < 0) sum.status = workers[i].status;
        }
    }
    close_all(&sum);
    return Py_BuildValue("LLLKs", sum.served, sum.limited, sum.busy, (unsigned long long)sum.retry_after_ns,
                         sum.status < 0 ? forebay->message(sum.status) : NULL);
}

static PyMethodDef functions[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_VARARGS | METH_KEYWORDS,
     "run(places, limiters, key, threads, requests): serve so many requests in each thread.\n\n"
     "Returns how many were served, how many a limit denied and how many found no place; the least time in ns until a\n"
     "limited request may come again; and the error that ended a thread or None."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "service", "Native threads that serve within limits.", -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_service(void) {
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
