// The words of the frame, and of several tabs. The other words of each tab are in its own file; their keys begin with the tab's name.

import { addWords } from "./i18n.js";

addWords({
  uiSkip: ["To the content", "跳到内容"],
  uiTabs: ["Parts of the page", "页面的各部分"],
  uiRuns: ["Runs", "运行"],
  uiTrain: ["Train", "训练"],
  uiPlan: ["Plan", "规划"],
  uiData: ["Data", "数据"],
  uiChat: ["Chat", "对话"],
  uiLoading: ["Loading…", "加载中…"],
  uiFailed: ["That did not work: {error}", "没有成功：{error}"],
  uiGone: ["The server does not answer. Runs go on without it; start it again with: penjing ui", "服务器没有回应。训练不受影响；重新启动：penjing ui"],
  uiNoToken: ["This page needs the whole address that `penjing ui` printed, with the token at its end.", "请使用 `penjing ui` 打印的完整地址，末尾带有令牌。"],
  uiCopyCommand: ["Copy the command", "复制命令"],
  uiCheckpoint: ["Checkpoint", "检查点"],
  uiStep: ["step {step}", "第 {step} 步"],
  uiCommand: ["The same on a command line", "等价的命令行"],
});
