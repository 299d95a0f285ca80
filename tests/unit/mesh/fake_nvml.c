/* The part of libnvidia-ml.so.1 that mesh/gpus/nvml.py asks, for the host that host.h describes. */

#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, GPU_LOST = 15, GPU = 0, SWITCH = 2, UNKNOWN = 255 };

struct link { int active, version, kind, remote; };
struct gpu {
    const char *uuid, *name;
    unsigned long long total, used;
    int mig, lost;
    struct link links[8];
};

#include "host.h" /* INIT, static const struct gpu gpus[] and levels[][] */

struct memory { unsigned long long total, free, used; };
struct pci {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};

#define COUNT (sizeof gpus / sizeof *gpus)
#define AT(handle) (&gpus[(size_t)(handle) - 1])

static int pci_of(size_t place, struct pci *out) {
    memset(out, 0, sizeof *out);
    out->bus = (unsigned)place + 0x17;
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
    return OK;
}

static int linked(void *handle, unsigned link) {
    return AT(handle)->links[0].active && link < 8 ? OK : NOT_SUPPORTED;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return INIT; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "made up"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = COUNT; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index >= COUNT) return INVALID;
    *handle = (void *)(size_t)(index + 1);
    return gpus[index].lost ? GPU_LOST : OK;
}

int nvmlDeviceGetUUID(void *handle, char *out, unsigned size) {
    snprintf(out, size, "%s", AT(handle)->uuid);
    return OK;
}

int nvmlDeviceGetName(void *handle, char *out, unsigned size) {
    snprintf(out, size, "%s", AT(handle)->name);
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *out) {
    out->total = AT(handle)->total;
    out->used = AT(handle)->used;
    out->free = out->total - out->used;
    return OK;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *later) {
    if (AT(handle)->mig < 0) return NOT_SUPPORTED;
    *now = *later = (unsigned)AT(handle)->mig;
    return OK;
}

int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *out) { return pci_of((size_t)handle - 1, out); }

int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *level) {
    *level = levels[(size_t)a - 1][(size_t)b - 1];
    return *level < 0 ? NOT_SUPPORTED : OK;
}

int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *active) {
    *active = (unsigned)(link < 8 && AT(handle)->links[link].active);
    return linked(handle, link);
}

int nvmlDeviceGetNvLinkVersion(void *handle, unsigned link, unsigned *version) {
    *version = (unsigned)AT(handle)->links[link].version;
    return linked(handle, link);
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *kind) {
    *kind = AT(handle)->links[link].kind;
    return linked(handle, link);
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, struct pci *out) {
    int remote = AT(handle)->links[link].remote;
    if (remote < 0) return NOT_SUPPORTED;
    pci_of((size_t)remote, out);
    return linked(handle, link);
}
