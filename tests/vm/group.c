/* A member of a multicast group on plain verbs, without rdma_cm, which joins no group of IPv6 on RoCE (README.md):
 * `group DEVICE GID-INDEX INTERFACE GROUP send|receive COUNT SIZE`. The number of the sending queue pair is the immediate data, as mckey has
 * it, and the payload is that of raw-datagram. What rdma_cm does for IPv4 only is done here: a socket joins the group, so that the
 * interface hears it and the network is told (MLD). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <arpa/inet.h>
#include <net/if.h>
#include <sys/socket.h>
#include <infiniband/verbs.h>

#define DEPTH 64
#define ROUTE_HEADER 40
#define QUEUE_KEY 0x01234567
#define CHECK(what) do { if (!(what)) { perror("group: " #what); exit(1); } } while (0)

static struct ibv_context *open_device(const char *name)
{
    int count;
    struct ibv_device **all = ibv_get_device_list(&count);
    CHECK(all);
    for (int i = 0; i < count; i++)
        if (!strcmp(ibv_get_device_name(all[i]), name))
            return ibv_open_device(all[i]);
    fprintf(stderr, "group: no device %s\n", name);
    exit(1);
}

static struct ibv_wc wait_for(struct ibv_cq *cq)
{
    struct ibv_wc wc;
    int found;
    while (!(found = ibv_poll_cq(cq, 1, &wc)))
        usleep(200);
    if (found < 0 || wc.status != IBV_WC_SUCCESS) {
        fprintf(stderr, "group: a work request failed: %s\n", ibv_wc_status_str(wc.status));
        exit(1);
    }
    return wc;
}

int main(int argc, char **argv)
{
    union ibv_gid group;
    struct ipv6_mreq membership;
    int count, size, sends;

    if (argc != 8 || inet_pton(AF_INET6, argv[4], &group) != 1 || (count = atoi(argv[6])) < 1 || count > 100000 ||
        (size = atoi(argv[7])) < 1 || size > 4096 || (!(sends = !strcmp(argv[5], "send")) && strcmp(argv[5], "receive"))) {
        fprintf(stderr, "usage: group DEVICE GID-INDEX INTERFACE GROUP send|receive COUNT SIZE\n");
        return 2;
    }
    struct ibv_context *device = open_device(argv[1]);
    CHECK(device);
    struct ibv_pd *pd = ibv_alloc_pd(device);
    CHECK(pd);
    struct ibv_cq *cq = ibv_create_cq(device, 2 * DEPTH, NULL, NULL, 0);
    CHECK(cq);
    size_t room = ROUTE_HEADER + size;
    unsigned char *buffers = calloc(DEPTH, room);
    CHECK(buffers);
    struct ibv_mr *region = ibv_reg_mr(pd, buffers, DEPTH * room, IBV_ACCESS_LOCAL_WRITE);
    CHECK(region);
    struct ibv_qp_init_attr made = {
        .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD,
        .cap = { .max_send_wr = 1, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
    };
    struct ibv_qp *qp = ibv_create_qp(pd, &made);
    CHECK(qp);
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QUEUE_KEY };
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
    attr.qp_state = IBV_QPS_RTR;
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
    attr.qp_state = IBV_QPS_RTS;
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));

    struct ibv_sge place = { .lkey = region->lkey };
    if (sends) {
        struct ibv_ah_attr way = {
            .is_global = 1, .port_num = 1, .grh = { .dgid = group, .sgid_index = atoi(argv[2]), .hop_limit = 1 },
        };
        struct ibv_ah *address = ibv_create_ah(pd, &way);
        CHECK(address);
        for (int i = 0; i < size; i++)
            buffers[i] = i ^ 0x5a;
        place.addr = (uintptr_t)buffers;
        place.length = size;
        struct ibv_send_wr *bad, wr = {
            .sg_list = &place, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM, .send_flags = IBV_SEND_SIGNALED,
            .imm_data = htonl(qp->qp_num),
            .wr.ud = { .ah = address, .remote_qpn = 0xffffff, .remote_qkey = QUEUE_KEY },
        };
        for (int i = 0; i < count; i++) {
            CHECK(!ibv_post_send(qp, &wr, &bad));
            wait_for(cq);
        }
        printf("%d sent\n", count);
        return 0;
    }
    place.length = room;
    struct ibv_recv_wr *bad, wr = { .sg_list = &place, .num_sge = 1 };
    for (wr.wr_id = 0; wr.wr_id < DEPTH; wr.wr_id++) {
        place.addr = (uintptr_t)(buffers + wr.wr_id * room);
        CHECK(!ibv_post_recv(qp, &wr, &bad));
    }
    memcpy(&membership.ipv6mr_multiaddr, &group, sizeof group);
    CHECK(membership.ipv6mr_interface = if_nametoindex(argv[3]));
    CHECK(!setsockopt(socket(AF_INET6, SOCK_DGRAM, 0), IPPROTO_IPV6, IPV6_JOIN_GROUP, &membership, sizeof membership));
    CHECK(!ibv_attach_mcast(qp, &group, 0));
    printf("joined %s\n", argv[4]);
    fflush(stdout);
    for (int i = 0; i < count; i++) {
        struct ibv_wc wc = wait_for(cq);
        unsigned char *octets = buffers + wc.wr_id * room;
        CHECK(wc.byte_len == room && wc.wc_flags & IBV_WC_GRH);
        CHECK(wc.wc_flags & IBV_WC_WITH_IMM && ntohl(wc.imm_data) == wc.src_qp);
        /* The route header is that of IPv6, to the group. */
        CHECK(octets[0] >> 4 == 6 && !memcmp(octets + 24, &group, sizeof group));
        for (int at = 0; at < size; at++)
            CHECK(octets[ROUTE_HEADER + at] == (unsigned char)(at ^ 0x5a));
        wr.wr_id = wc.wr_id;
        place.addr = (uintptr_t)octets;
        CHECK(!ibv_post_recv(qp, &wr, &bad));
    }
    printf("%d received\n", count);
    return 0;
}
