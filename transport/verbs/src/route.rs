//! Conversions between [`Route`] and the library's address handle attributes.

use super::sys::{ibv_ah_attr, ibv_gid, ibv_global_route};
use rdma_transport::datagram::Route;

pub(super) fn ah_attr(route: &Route) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: route.gid },
            flow_label: route.flow_label,
            sgid_index: route.source_gid_index,
            hop_limit: route.hop_limit,
            traffic_class: route.traffic_class,
        },
        dlid: route.lid,
        sl: route.service_level,
        src_path_bits: route.path_bits,
        static_rate: route.static_rate,
        is_global: route.is_global.into(),
        port_num: route.port,
    }
}

pub(super) fn route(attr: &ibv_ah_attr) -> Route {
    Route {
        // SAFETY: each field of the union is 16 bytes, and any bytes are valid.
        gid: unsafe { attr.grh.dgid.raw },
        is_global: attr.is_global != 0,
        source_gid_index: attr.grh.sgid_index,
        flow_label: attr.grh.flow_label,
        hop_limit: attr.grh.hop_limit,
        traffic_class: attr.grh.traffic_class,
        lid: attr.dlid,
        service_level: attr.sl,
        path_bits: attr.src_path_bits,
        static_rate: attr.static_rate,
        port: attr.port_num,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_survives_as_attributes() {
        let wanted = Route {
            gid: *b"\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\x4d\x02\x01",
            is_global: true,
            source_gid_index: 1,
            flow_label: 7,
            hop_limit: 64,
            traffic_class: 3,
            lid: 9,
            service_level: 2,
            path_bits: 1,
            static_rate: 4,
            port: 1,
        };
        assert_eq!(route(&ah_attr(&wanted)), wanted);
    }
}
