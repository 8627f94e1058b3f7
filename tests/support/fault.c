/* Before libc: calls that read fail by what the file $FAULT says, "errno times path calls": as often as `times` (-1: for
 * ever), of files whose path has `path` in it. calls: o open, r read, d list a folder, s and f size. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static __thread int busy;

#define NEXT(name) static __typeof__(name) *next; if (!next) next = dlsym(RTLD_NEXT, #name)

static int fails(const char *path, char call) {
    if (busy || !path || !getenv("FAULT")) return 0;
    int error = 0, before = errno, code, times;
    char text[1024], part[900], calls[16];
    busy = 1;
    int file = open(getenv("FAULT"), O_RDWR);
    ssize_t size = file < 0 ? -1 : pread(file, text, sizeof text - 1, 0);
    if (size > 0) {
        text[size] = 0;
        if (sscanf(text, "%d %d %899s %15s", &code, &times, part, calls) == 4 && times && strstr(path, part)
                && strchr(calls, call)) {
            error = code;
            if (times > 0) {
                size = snprintf(text, sizeof text, "%d %d %s %s", code, times - 1, part, calls);
                pwrite(file, text, size, 0);
                ftruncate(file, size);
            }
        }
    }
    if (file >= 0) close(file);
    busy = 0;
    errno = error ? error : before;
    return error;
}

static int fails_at(int file, char call) {
    static __thread char path[4096];
    char link[64];
    if (busy) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    path[size < 0 ? 0 : size] = 0;
    return fails(path, call);
}

#define OPEN(name) int name(const char *path, int flags, ...) { \
    va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); NEXT(name); \
    return !(flags & (O_WRONLY | O_RDWR)) && fails(path, 'o') ? -1 : next(path, flags, mode); }
OPEN(open)
OPEN(open64)
ssize_t read(int file, void *to, size_t size) { NEXT(read); return fails_at(file, 'r') ? -1 : next(file, to, size); }
#define PREAD(name, from, offset) ssize_t name(int file, from, size_t size, offset at) { \
    NEXT(name); return fails_at(file, 'r') ? -1 : next(file, to, size, at); }
PREAD(pread, void *to, off_t)
PREAD(pread64, void *to, off64_t)
#define STAT(name, type) int name(const char *path, struct type *to) { \
    NEXT(name); return fails(path, 's') ? -1 : next(path, to); }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
#define FSTAT(name, type) int name(int file, struct type *to) { \
    NEXT(name); return fails_at(file, 'f') ? -1 : next(file, to); }
FSTAT(fstat, stat)
FSTAT(fstat64, stat64)
DIR *opendir(const char *path) { NEXT(opendir); return fails(path, 'd') ? 0 : next(path); }
