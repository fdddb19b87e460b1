/* Preloaded into servers under `make sanitize`: Valkey 9 opens modules with RTLD_DEEPBIND, which would
 * bind the job core to the C library's own malloc, past AddressSanitizer; its runtime refuses that. It
 * also keeps modules in memory to the end, where leaks are reported: they would have no names otherwise. */
#define _GNU_SOURCE
#include <dlfcn.h>

void *dlopen(const char *file, int flags) {
    union {
        void *symbol;
        void *(*function)(const char *, int);
    } next = {dlsym(RTLD_NEXT, "dlopen")};
    return next.function(file, (flags & ~RTLD_DEEPBIND) | RTLD_NODELETE);
}
