/* A peer on plain verbs that asks for solicited events only: `solicited ADDR PORT COUNT WHICH` takes one connection and
 * COUNT messages, and sends each back. Number WHICH has to wake it, and no other one may. Exit status 0 if that was so. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <arpa/inet.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

#define LARGEST 4096
#define CHECK(what) do { if (!(what)) { perror("solicited: " #what); exit(1); } } while (0)

static int wakes(struct rdma_cm_id *id, int milliseconds)
{
    struct pollfd channel = { .fd = id->recv_cq_channel->fd, .events = POLLIN };
    int ready = poll(&channel, 1, milliseconds);
    CHECK(ready >= 0);
    return ready;
}

static void arm(struct rdma_cm_id *id)
{
    CHECK(!ibv_req_notify_cq(id->recv_cq, 1));
}

int main(int argc, char **argv)
{
    struct rdma_cm_id *listener, *id;
    struct sockaddr_in address = { .sin_family = AF_INET };
    struct rdma_cm_event *event;
    struct ibv_wc wc;
    int count, which;

    if (argc != 5 || inet_pton(AF_INET, argv[1], &address.sin_addr) != 1 ||
        (count = atoi(argv[3])) < 1 || count > 100 || (which = atoi(argv[4])) < 1 || which > count) {
        fprintf(stderr, "usage: solicited ADDR PORT COUNT WHICH\n");
        return 2;
    }
    address.sin_port = htons(atoi(argv[2]));
    CHECK(!rdma_create_id(NULL, &listener, NULL, RDMA_PS_TCP));
    CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&address));
    CHECK(!rdma_listen(listener, 1));
    CHECK(!rdma_get_request(listener, &id));

    struct ibv_qp_init_attr attributes = {
        .cap = { .max_send_wr = 2, .max_recv_wr = count, .max_send_sge = 1, .max_recv_sge = 1 },
        .qp_type = IBV_QPT_RC,
    };
    CHECK(!rdma_create_qp(id, NULL, &attributes));
    char *buffers = calloc(count, LARGEST);
    CHECK(buffers);
    struct ibv_mr *region = rdma_reg_msgs(id, buffers, (size_t)count * LARGEST);
    CHECK(region);
    for (int i = 0; i < count; i++)
        CHECK(!rdma_post_recv(id, NULL, buffers + (size_t)i * LARGEST, LARGEST, region));
    arm(id);
    CHECK(!rdma_accept(id, NULL));

    for (int i = 1; i <= count; i++) {
        if (i == which) {
            struct ibv_cq *cq;
            void *context;
            if (!wakes(id, 20000)) {
                fprintf(stderr, "solicited: message %d woke nobody\n", i);
                return 1;
            }
            CHECK(!ibv_get_cq_event(id->recv_cq_channel, &cq, &context));
            ibv_ack_cq_events(cq, 1);
            arm(id);
            CHECK(ibv_poll_cq(id->recv_cq, 1, &wc) == 1);
        } else {
            int found, left = 20000;
            while (!(found = ibv_poll_cq(id->recv_cq, 1, &wc)) && left--)
                usleep(1000);
            CHECK(found == 1);
            /* The event of a completion comes right behind it. */
            if (wakes(id, 200)) {
                fprintf(stderr, "solicited: message %d woke the peer\n", i);
                return 1;
            }
        }
        CHECK(wc.status == IBV_WC_SUCCESS);
        char *message = buffers + (size_t)(i - 1) * LARGEST;
        CHECK(!rdma_post_send(id, NULL, message, wc.byte_len, region, IBV_SEND_SIGNALED));
        CHECK(rdma_get_send_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
    }
    printf("message %d of %d woke the peer, and no other one\n", which, count);
    /* The other side ends the connection. */
    CHECK(!rdma_get_cm_event(id->channel, &event));
    CHECK(event->event == RDMA_CM_EVENT_DISCONNECTED);
    rdma_ack_cm_event(event);
    rdma_disconnect(id);
    rdma_dereg_mr(region);
    rdma_destroy_qp(id);
    rdma_destroy_id(id);
    rdma_destroy_id(listener);
    free(buffers);
    return 0;
}
