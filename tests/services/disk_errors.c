/* Makes calls to the file system fail in every process that has it in LD_PRELOAD.

   Which ones stands in the file that DISK_ERRORS names, a `struct errors` in memory that the test
   and all processes share. The threads of a process throw their dice independently. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, FSYNC = 2, READ = 4, OPEN = 8, NAME = 16 };

struct errors {
    volatile int calls;    /* which of the above fail; 0: none */
    volatile int error;    /* an errno */
    volatile int percent;  /* how many of them */
    char path[PATH_MAX];   /* a part of the paths concerned */
    int count;             /* calls that have failed */
};

static struct errors *errors;

__attribute__((constructor)) static void attach(void) {
    const char *name = getenv("DISK_ERRORS");
    /* Not open(): it is one of those below. */
    long file = name ? syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *memory = mmap(NULL, sizeof *errors, PROT_READ | PROT_WRITE, MAP_SHARED, (int)file, 0);
    syscall(SYS_close, file);
    if (memory != MAP_FAILED)
        errors = memory;
}

static int fails(int call, const char *path) {
    static __thread unsigned seed;
    if (!errors || !(errors->calls & call) || !path || !strstr(path, errors->path))
        return 0;
    if (!seed)
        seed = (unsigned)getpid() ^ (unsigned)(size_t)&seed;
    if (rand_r(&seed) % 100 >= errors->percent)
        return 0;
    __atomic_fetch_add(&errors->count, 1, __ATOMIC_RELAXED);
    errno = errors->error;
    return 1;
}

static int fails_in(int call, int file) {
    char link[64], path[PATH_MAX];
    if (!errors || !(errors->calls & call))
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return fails(call, path);
}

#define INSTEAD_OF(result, name, parameters, condition, ...)        \
    result name parameters {                                        \
        static result(*real) parameters;                            \
        if (!real)                                                  \
            real = (result(*) parameters)dlsym(RTLD_NEXT, #name);   \
        return (condition) ? -1 : real(__VA_ARGS__);                \
    }

INSTEAD_OF(ssize_t, write, (int f, const void *b, size_t n), fails_in(WRITE, f), f, b, n)
INSTEAD_OF(ssize_t, pwrite, (int f, const void *b, size_t n, off_t o), fails_in(WRITE, f), f, b, n, o)
INSTEAD_OF(ssize_t, pwrite64, (int f, const void *b, size_t n, off64_t o), fails_in(WRITE, f), f, b, n, o)
INSTEAD_OF(ssize_t, writev, (int f, const struct iovec *v, int n), fails_in(WRITE, f), f, v, n)
INSTEAD_OF(int, fsync, (int f), fails_in(FSYNC, f), f)
INSTEAD_OF(int, fdatasync, (int f), fails_in(FSYNC, f), f)
INSTEAD_OF(ssize_t, read, (int f, void *b, size_t n), fails_in(READ, f), f, b, n)
INSTEAD_OF(ssize_t, pread, (int f, void *b, size_t n, off_t o), fails_in(READ, f), f, b, n, o)
INSTEAD_OF(ssize_t, pread64, (int f, void *b, size_t n, off64_t o), fails_in(READ, f), f, b, n, o)
INSTEAD_OF(int, rename, (const char *a, const char *b), fails(NAME, b), a, b)
INSTEAD_OF(int, link, (const char *a, const char *b), fails(NAME, b), a, b)

/* Their mode is there only with O_CREAT; what is passed on besides is ignored. */
#define MODE(after)                 \
    va_list rest;                   \
    va_start(rest, after);          \
    mode_t mode = va_arg(rest, mode_t); \
    va_end(rest)

#define INSTEAD_OF_OPEN(name)                                                       \
    int name(const char *path, int flags, ...) {                                    \
        static int (*real)(const char *, int, ...);                                 \
        if (!real)                                                                  \
            real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name);        \
        MODE(flags);                                                                \
        return fails(OPEN, path) ? -1 : real(path, flags, mode);                    \
    }

#define INSTEAD_OF_OPENAT(name)                                                     \
    int name(int folder, const char *path, int flags, ...) {                        \
        static int (*real)(int, const char *, int, ...);                            \
        if (!real)                                                                  \
            real = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name);   \
        MODE(flags);                                                                \
        return fails(OPEN, path) ? -1 : real(folder, path, flags, mode);            \
    }

INSTEAD_OF_OPEN(open)
INSTEAD_OF_OPEN(open64)
INSTEAD_OF_OPENAT(openat)
INSTEAD_OF_OPENAT(openat64)
